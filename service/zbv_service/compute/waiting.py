"""Waiting for an event with a time limit."""

from __future__ import annotations

import asyncio


async def happened(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait for an event, without a limit if ``seconds`` is None; False if it does not happen in time."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
