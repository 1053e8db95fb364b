"""Answers of a service for tests of the client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import httpx
from zbv_service.client import AgentClient

SEARCH: dict[str, Any] = {
    **dict.fromkeys(("objective", "lower_bound", "gap", "plan_id", "error", "method")),
    **{"id": "a", "state": "queued", "attempts": 0, "options": {}, "created_at": "2026-01-02T03:04:05Z"},
}
Given = httpx.Response | Exception
Answering = Callable[..., tuple[AgentClient, list[httpx.Request]]]


def problem(status: int, **more: Any) -> httpx.Response:
    return httpx.Response(status, json={"type": "t", "title": "T", "status": status, "detail": "D", **more})


def found(**changes: Any) -> httpx.Response:
    return httpx.Response(200, json={**SEARCH, **changes})


def stream(*events: tuple[str, str, dict[str, Any]], cut: str = "") -> httpx.Response:
    """An event stream of (id, kind, data); ``cut`` is what there is of one more."""
    text = "".join(f"id: {id_}\nevent: {kind}\ndata: {json.dumps(data)}\n\n" for id_, kind, data in events)
    return httpx.Response(200, text=text + cut, headers={"Content-Type": "text/event-stream; charset=utf-8"})


def streaming(chunks: Iterable[bytes]) -> httpx.Response:
    """An event stream of these chunks."""
    return httpx.Response(200, content=chunks, headers={"Content-Type": "text/event-stream"})
