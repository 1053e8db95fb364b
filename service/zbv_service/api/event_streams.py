"""Streams of server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar, cast

from fastapi.sse import EventSourceResponse, format_sse_event
from starlette.types import Send

from zbv_service.api.negotiation import VARY

RETRY = format_sse_event(retry=1000)
"""The first bytes of a stream: clients reconnect after this many milliseconds."""
SIGN_OF_LIFE = format_sse_event(comment="still here")
FEW = 4
"""Events that are encoded at once. An event has some kilobytes at most."""

E = TypeVar("E")


async def encoded(encode: Callable[[E], bytes], batch: Sequence[E]) -> bytes:
    """A batch of events as bytes, a sign of life if it is empty; many events are encoded in a thread."""
    if len(batch) <= FEW:
        return b"".join(map(encode, batch)) or SIGN_OF_LIFE
    return await asyncio.to_thread(lambda: b"".join(map(encode, batch)))


class EventStream(EventSourceResponse):
    """Closes its iterator as soon as the reader disconnects, instead of when it is garbage-collected."""

    def __init__(self, content: AsyncIterator[bytes]):
        super().__init__(content, headers={**VARY, "Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    async def stream_response(self, send: Send) -> None:
        """Send the events."""
        async with aclosing(cast("Any", self.body_iterator)):
            await super().stream_response(send)
