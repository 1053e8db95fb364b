"""Clients of both kinds with given answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from support.client_answers import Answering, Chunks, Given
from support.clients import AT_ONCE, KINDS, Driver
from zbv_service.client import AsyncClient, Client
from zbv_service.client.asynchronous import connection as asynchronous
from zbv_service.client.synchronous import connection as synchronous


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between requests, which do not take place."""
    found: list[float] = []

    async def sleep(seconds: float) -> None:
        found.append(seconds)

    monkeypatch.setattr(synchronous, "time", SimpleNamespace(sleep=found.append))
    monkeypatch.setattr(asynchronous, "asyncio", SimpleNamespace(sleep=sleep))
    return found


@pytest.fixture(params=KINDS)
def connect(request: pytest.FixtureRequest) -> Iterator[Callable[..., Driver]]:
    """Makes clients of both kinds; a function answers their requests."""
    with asyncio.Runner() as runner:

        def make(answer: Callable[[httpx.Request], httpx.Response], **options: Any) -> Driver:
            kind = Client if request.param == "sync" else AsyncClient
            options = {"retries": AT_ONCE, "transport": httpx.MockTransport(answer), **options}
            return Driver(kind("http://zbv", **options), runner)

        yield make


@pytest.fixture
def answering(connect: Callable[..., Driver]) -> Answering:
    """Makes a client that gets the given answers in order; returns it with the list of its requests."""

    def make(*answers: Given, **options: Any) -> tuple[Driver, list[httpx.Request]]:
        left, requests = iter(answers), []

        def answer(request: httpx.Request) -> httpx.Response:
            requests.append(request)
            given = next(left)
            if isinstance(given, Exception):
                raise given
            # A copy, because a response can be read once; a stream, because the network sends one.
            return httpx.Response(given.status_code, headers=given.headers, stream=Chunks([given.content]))

        return connect(answer, **options), requests

    return make
