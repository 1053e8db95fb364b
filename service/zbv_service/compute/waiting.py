"""Waiting for something to happen, and not for ever."""

from __future__ import annotations

import asyncio


async def happened(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait for an event, None as long as it takes; False when it does not happen in time."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
