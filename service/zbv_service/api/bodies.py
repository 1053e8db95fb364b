"""Reads request bodies within limits of size, time and memory.

The framework's body parsing is not used, because it accepts NaN and its messages differ from those
of the command line.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

from zbv_service.api.state import state_of
from zbv_service.documents.parsing import malformed, parse_json, parse_medium, too_large
from zbv_service.errors import BODY_TOO_SLOW, NOT_READY, UNSUPPORTED_MEDIA_TYPE, ApiError
from zbv_service.observability.context import CALLER

T = TypeVar("T")

SMALL = 64 * 1024
"""Bodies up to this many bytes are decoded in this process, so that agents' reports do not queue."""
MEDIUM = 1024**2
"""Most bytes in the body of a run or an agent; other bodies may be larger."""
IN_MEMORY, IN_MEMORY_EACH = 192 * 1024**2, 96 * 1024**2
"""Most bytes of bodies in memory at the same time: of all requests, and of one caller."""
FREE = 64 * 1024
"""Bytes of each body that are not counted, because connections are limited too."""
SLOWEST = 16 * 1024
"""Bytes per second; slower bodies are refused after ``settings.request_seconds``."""


class Media(NamedTuple):
    """The content types of a kind of body, and how to send it."""

    pattern: re.Pattern[str]
    how: str


JSON = Media(re.compile(r"application/json|.*\+json"), "JSON as application/json")
FORM = Media(re.compile("application/x-www-form-urlencoded"), "a form as a browser does")


async def read_json(request: Request, limit: int, read: Callable[[Any], T]) -> T:
    """Apply a function to the decoded JSON body of a request, of at most ``limit`` and ``MEDIUM`` bytes.

    Parameters
    ----------
    read
        Checks the document, and returns a small result. It runs in another process for large bodies.

    Raises
    ------
    ApiError
        413: the body is larger. 415: it is not declared as JSON, or compressed. 400: it is not JSON.
    InvalidInput
        The body breaks a rule.
    """
    async with read_text(request, min(limit, MEDIUM)) as body:
        if len(body) <= SMALL:
            return read(parse_json(body))
        return await state_of(request).computations.run(partial(_read_medium, read), body)


@asynccontextmanager
async def read_text(
    request: Request, limit: int, media: Media | None = JSON, *, may_be_gzip: bool = False
) -> AsyncIterator[bytearray]:
    """Within the block, the body of a request, of at most ``limit`` bytes, which stay reserved.

    Parameters
    ----------
    media
        What the body must be declared as; None for anything.
    may_be_gzip
        Whether it may be compressed; :func:`is_gzip` tells.

    Raises
    ------
    ApiError
        413: the body is larger. 415: it is declared as something else. 503: too many bodies are in memory.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media is not None and not media.pattern.fullmatch(kind):
        raise ApiError(UNSUPPORTED_MEDIA_TYPE, f"found content type {kind!r}; send {media.how}.")
    encoding = ", ".join(request.headers.getlist("content-encoding")).strip().lower() or "identity"
    encodings = ("identity", "gzip") if may_be_gzip else ("identity",)
    if encoding not in encodings:
        raise ApiError(
            UNSUPPORTED_MEDIA_TYPE,
            f"found content encoding {encoding[:60]!r}; send it plain{' or as gzip' if may_be_gzip else ''}.",
            headers={"Accept-Encoding": ", ".join(encodings)},  # RFC 9110, section 12.5.3
        )
    declared = request.headers.get("content-length", "")
    is_declared = declared.isdecimal() and len(declared) < 20
    if is_declared and int(declared) > limit:
        raise too_large(limit)
    memory: BodyMemory = request.app.state.body_memory
    with memory.reserved(int(declared) if is_declared else limit):
        body, loop = bytearray(), asyncio.get_running_loop()
        until = loop.time() + request.app.state.settings.request_seconds
        try:
            async with asyncio.timeout_at(until) as patience:
                async for part in request.stream():
                    body += part
                    if len(body) > limit:
                        raise too_large(limit)
                    patience.reschedule(until + len(body) / SLOWEST)
        except TimeoutError:
            raise ApiError(
                BODY_TOO_SLOW,
                f"The body stopped arriving after {len(body)} bytes; send it again, faster.",
                headers={"Connection": "close"},
            ) from None
        except ClientDisconnect:
            raise malformed("it ends before its declared length") from None
        yield body


def is_gzip(request: Request) -> bool:
    """Whether the body is declared as compressed."""
    return request.headers.get("content-encoding", "").strip().lower() == "gzip"


async def read_form(request: Request, limit: int) -> str:
    """The encoded body of a browser's form; see :func:`read_text`."""
    async with read_text(request, limit, FORM) as body:
        return body.decode("latin-1")


def _read_medium(read: Callable[[Any], T], body: bytes | bytearray) -> T:
    return read(parse_medium(body))


class BodyMemory:
    """Counts the bytes of bodies in memory; a body reserves its bytes before they arrive."""

    def __init__(self, most: int = IN_MEMORY, most_each: int = IN_MEMORY_EACH) -> None:
        self._most = most
        self._most_each = most_each
        self._held: Counter[str] = Counter()

    @contextmanager
    def reserved(self, size: int) -> Iterator[None]:
        """Reserve bytes within the block; raises :class:`ApiError` 503 if too many are in use."""
        size, caller = max(0, size - FREE), CALLER.get() or ""
        # A single body is always accepted, because the operator may allow bodies larger than these limits.
        if size and (
            (self._held[caller] and self._held[caller] + size > self._most_each)
            or (self._held.total() and self._held.total() + size > self._most)
        ):
            raise ApiError(
                NOT_READY,
                "Other large bodies are being read now; send this one again in a moment.",
                headers={"Retry-After": "2", "Connection": "close"},  # its body is not read
            )
        self._held[caller] += size
        try:
            yield
        finally:
            self._held[caller] -= size
            if not self._held[caller]:
                del self._held[caller]
