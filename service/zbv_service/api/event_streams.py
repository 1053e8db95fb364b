"""The events of searches and runs as responses: as a stream of server-sent events, or as a list."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Annotated, Any, cast

from fastapi import Header, Query, Request, Response
from fastapi.sse import EventSourceResponse, format_sse_event
from pydantic import BaseModel
from starlette.types import Send

from zbv_service.api.negotiation import EVENT_STREAM, JSON, VARY
from zbv_service.api.state import state_of
from zbv_service.database.events import E, EventFeed
from zbv_service.security.access import READ_SCOPES

RETRY = format_sse_event(retry=1000)
"""The first bytes of a stream: clients reconnect after this many milliseconds."""
SIGN_OF_LIFE = format_sse_event(comment="still here")
FEW = 4
"""Events that are encoded at once. An event has some kilobytes at most."""
_MAX_NUMBER = 2**31 - 1

EventNumber = Annotated[
    int | None, Query(ge=0, le=_MAX_NUMBER, description="Return only events after this one.")
]
LastEventId = Annotated[
    int | None,
    Header(alias="Last-Event-ID", ge=0, le=_MAX_NUMBER, description="As `after`; browsers send it."),
]
DESCRIPTION = "The events so far, or a stream of them that ends after the event `end`."


def responses(what: str, example: str) -> dict[int | str, dict[str, Any]]:
    """The responses of a route with the events of a search or run, for its OpenAPI document."""
    stream = {"schema": {"type": "string"}, "example": example}
    return {
        200: {"content": {EVENT_STREAM: stream}},
        204: {"description": f"No event follows, because the {what} has ended. Do not reconnect."},
    }


async def listed(make: Callable[[], BaseModel]) -> Response:
    """A list of events, which is made and written in a thread."""
    text = await asyncio.to_thread(lambda: make().model_dump_json(exclude_unset=True))
    return Response(text, headers={**VARY, "Cache-Control": "no-store"}, media_type=JSON)


def followed(
    request: Request, feed: EventFeed[E], owner: str, number: int, encode: Callable[[E], bytes]
) -> Response:
    """A stream of the events after a number, until their owner ends or the token becomes invalid."""
    return EventStream(_stream(request, feed, owner, number, encode))


def over() -> Response:
    """No event follows."""
    return Response(status_code=204, headers=VARY)


async def _stream(
    request: Request, feed: EventFeed[E], owner: str, number: int, encode: Callable[[E], bytes]
) -> AsyncIterator[bytes]:
    access = state_of(request).access
    yield RETRY
    async with aclosing(cast("Any", feed.follow(owner, number))) as batches:
        async for batch in batches:
            if not await access.is_still_allowed(request, READ_SCOPES):
                return  # a reader that reconnects learns why
            if len(batch) > FEW:
                async with feed.many:
                    text = await asyncio.to_thread(lambda events: b"".join(map(encode, events)), batch)
                yield text
            else:
                yield b"".join(map(encode, batch)) or SIGN_OF_LIFE


class EventStream(EventSourceResponse):
    """Closes its iterator as soon as the reader disconnects, instead of when it is garbage-collected."""

    def __init__(self, content: AsyncIterator[bytes]):
        super().__init__(content, headers={**VARY, "Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    async def stream_response(self, send: Send) -> None:
        """Send the events."""
        async with aclosing(cast("Any", self.body_iterator)):
            await super().stream_response(send)
