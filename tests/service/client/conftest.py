"""Clients with given answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from support.client_answers import Answering, Given
from zbv_service.client import AgentClient, Retries

AT_ONCE = Retries(count=2, first=0.0, longest=0.0)


@pytest.fixture
def connect() -> Callable[..., AgentClient]:
    """Makes clients; a function answers their requests."""

    def make(answer: Callable[[httpx.Request], httpx.Response], **options: Any) -> AgentClient:
        given: dict[str, Any] = {"retries": AT_ONCE, "transport": httpx.MockTransport(answer)} | options
        return AgentClient("http://zbv", **given)

    return make


@pytest.fixture
def answering(connect: Callable[..., AgentClient]) -> Answering:
    """Makes a client that gets the given answers in order; returns it with the list of its requests."""

    def make(*answers: Given, **options: Any) -> tuple[AgentClient, list[httpx.Request]]:
        left, requests = iter(answers), []

        def answer(request: httpx.Request) -> httpx.Response:
            requests.append(request)
            given = next(left)
            if isinstance(given, Exception):
                raise given
            # A copy, because a response can be read once; a stream, because the network sends one.
            return httpx.Response(given.status_code, headers=given.headers, content=iter([given.content]))

        return connect(answer, **options), requests

    return make
