"""Batches heartbeats: those that arrive during a write are stored together by the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from zbv_service.database import HeartbeatTable
from zbv_service.records.agents import Beat, BeatAnswer

PAUSE_SECONDS = 0.05
"""Seconds between two writes, so that each stores many heartbeats; a single one does not wait."""
MOST = 256
"""Most heartbeats in one write, which locks as many agents."""

_Waiting = tuple[Beat, "asyncio.Future[BeatAnswer]"]


class Heartbeats:
    """The heartbeats that one service receives."""

    def __init__(self, table: HeartbeatTable):
        self._table = table
        self._waiting: list[_Waiting] = []
        self._writer: asyncio.Task[None] | None = None

    async def store(self, beat: Beat) -> BeatAnswer:
        """Store a heartbeat, and return the answer for its agent; raises :class:`DatabaseAway`."""
        future: asyncio.Future[BeatAnswer] = asyncio.get_running_loop().create_future()
        self._waiting.append((beat, future))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write_all(), name="zbv-heartbeats")
        return await future

    async def stop(self) -> None:
        """Store the remaining heartbeats; no more arrive."""
        if self._writer is not None:
            await self._writer

    async def _write_all(self) -> None:
        while self._waiting:
            taken, self._waiting = self._waiting[:MOST], self._waiting[MOST:]
            await self._write(taken)
            if self._waiting or len(taken) > 1:
                await asyncio.sleep(PAUSE_SECONDS)

    async def _write(self, taken: Sequence[_Waiting]) -> None:
        last = {(beat.agent_id, beat.run_id): beat for beat, _ in taken}
        try:
            answers = await self._table.store([*last.values()])
        except Exception as error:  # all waiting requests get it, as if each had stored alone
            for _, future in taken:
                if not future.done():
                    future.set_exception(error)
            return
        found = dict(zip(last, answers, strict=True))
        for beat, future in taken:
            if not future.done():  # the request may have been cancelled
                future.set_result(found[beat.agent_id, beat.run_id])
