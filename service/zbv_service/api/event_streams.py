"""Streams of server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, cast

from fastapi.sse import EventSourceResponse, format_sse_event
from starlette.types import Send

from zbv_service.api.negotiation import VARY

RETRY = format_sse_event(retry=1000)
"""The first bytes of a stream: clients reconnect after this many milliseconds."""
SIGN_OF_LIFE = format_sse_event(comment="still here")


class EventStream(EventSourceResponse):
    """Closes its iterator as soon as the reader disconnects, instead of when it is garbage-collected."""

    def __init__(self, content: AsyncIterator[bytes]):
        super().__init__(content, headers={**VARY, "Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    async def stream_response(self, send: Send) -> None:
        """Send the events."""
        async with aclosing(cast("Any", self.body_iterator)):
            await super().stream_response(send)
