"""The request, the caller and the search for which the current code runs; log lines contain the ids.

Tasks and threads inherit context variables from the task that starts them, so functions need not pass them.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any


class Client:
    """The client of one request.

    Parameters
    ----------
    receive
        The ASGI function of the request.
    has_body
        Whether the request has a body. Only after it is read can the departure be noticed.

    Attributes
    ----------
    is_answered
        Whether the answer has begun. What continues then, such as a bound for the next reader of a page, no
        longer depends on this client.
    """

    def __init__(self, receive: Callable[[], Awaitable[Any]], has_body: bool = False):
        self._receive = receive
        self._is_body_read = None if not has_body else asyncio.Event()
        self._unread: list[Any] = []
        self.is_answered = False

    async def receive(self) -> Any:
        """The ASGI function for the application."""
        if self._unread:
            return self._unread.pop()
        message = await self._receive()
        if self._is_body_read is not None and not message.get("more_body", False):
            self._is_body_read.set()
        return message

    async def departure(self) -> None:
        """Wait until the client disconnects without an answer."""
        if self._is_body_read is not None:
            await self._is_body_read.wait()
        while (message := await self._receive())["type"] != "http.disconnect":
            self._unread = [message]  # of a request without a body; the application may still ask for it
        if self.is_answered:
            await asyncio.Event().wait()  # until this is cancelled


REQUEST_ID: ContextVar[str | None] = ContextVar("zbv_request_id", default=None)
CALLER: ContextVar[str | None] = ContextVar("zbv_caller", default=None)
"""The name of the request's token, or the client's address if the service needs no token."""
CLIENT: ContextVar[Client | None] = ContextVar("zbv_client", default=None)
"""The client for which the current code runs; None for work that nobody waits for."""
SEARCH_ID: ContextVar[str | None] = ContextVar("zbv_search_id", default=None)
ROOT_PATH: ContextVar[str] = ContextVar("zbv_root_path", default="")
"""The prefix under which a proxy serves the application, without a trailing slash."""

_SANE = re.compile(rb"[A-Za-z0-9._:+/=-]{1,128}")
"""Ids that callers may choose. The characters are harmless in headers, log lines and pages."""


def request_id_of(headers: Sequence[tuple[bytes, bytes]]) -> str:
    """The valid X-Request-ID of a request, or else a new id."""
    for name, value in headers:
        if name == b"x-request-id" and _SANE.fullmatch(value):
            return value.decode()
    return secrets.token_hex(16)


@contextmanager
def working_for(*, search_id: str, request_id: str | None = None) -> Iterator[None]:
    """Inside this block, log lines name a search and the request that submitted it."""
    search, request = SEARCH_ID.set(search_id), REQUEST_ID.set(request_id or REQUEST_ID.get())
    try:
        yield
    finally:
        SEARCH_ID.reset(search)
        REQUEST_ID.reset(request)
