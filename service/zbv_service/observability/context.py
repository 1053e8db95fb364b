"""Whose request, which one, and which search the current code works for: every log line says so.

Context variables follow a task into the tasks and threads that it starts, so nobody passes them on.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

HEADER = "X-Request-ID"

REQUEST_ID: ContextVar[str | None] = ContextVar("zbv_request_id", default=None)
CALLER: ContextVar[str | None] = ContextVar("zbv_caller", default=None)
"""Whose request it is: the name of a token, or the address of a client that needs none."""
CLIENT_GONE: ContextVar[asyncio.Event | None] = ContextVar("zbv_client_gone", default=None)
"""Happens when the client of a request with a body hangs up."""
SEARCH_ID: ContextVar[str | None] = ContextVar("zbv_search_id", default=None)
ROOT_PATH: ContextVar[str] = ContextVar("zbv_root_path", default="")
"""The prefix under which a proxy serves the application, without a trailing slash."""

_SANE = re.compile(rb"[A-Za-z0-9._:+/=-]{1,128}")
"""What callers may choose: nothing that could break out of a header, a log line or a page."""


def request_id_of(headers: Sequence[tuple[bytes, bytes]]) -> str:
    """The id that a caller gave its request, or a new one when it gave none that is sane."""
    for name, value in headers:
        if name == b"x-request-id" and _SANE.fullmatch(value):
            return value.decode()
    return secrets.token_hex(16)


@contextmanager
def working_for(*, search_id: str, request_id: str | None = None) -> Iterator[None]:
    """Have the log lines of this block name a search, and the request that asked for it."""
    search, request = SEARCH_ID.set(search_id), REQUEST_ID.set(request_id or REQUEST_ID.get())
    try:
        yield
    finally:
        SEARCH_ID.reset(search)
        REQUEST_ID.reset(request)
