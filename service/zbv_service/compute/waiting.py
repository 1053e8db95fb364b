"""Waiting with a limit: for an event, or for as long as the client of the request waits, too."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from zbv_service.errors import NOT_READY, ApiError
from zbv_service.observability.context import CLIENT

T = TypeVar("T")


async def happened(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait for an event, without a limit if ``seconds`` is None; False if it does not happen in time."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def while_client_waits(making: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine, which is cancelled when the client of this request disconnects.

    Raises
    ------
    ApiError
        503: the client has disconnected; nobody reads it.
    Exception
        Any error of the coroutine.
    """
    client = CLIENT.get()
    if client is None or client.is_answered:
        return await making
    made, leaving = asyncio.create_task(making), asyncio.create_task(client.departure())
    try:
        await asyncio.wait([made, leaving], return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        if not made.done():
            made.cancel()
            await asyncio.wait([made])
    if made.cancelled():
        raise ApiError(NOT_READY, "The client disconnected, so the service ended its computation.")
    return made.result()
