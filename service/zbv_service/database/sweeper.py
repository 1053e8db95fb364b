"""Every ten minutes, removes rows that are older than the operator wants to keep."""

from __future__ import annotations

import asyncio
import logging

from zbv_service.compute.waiting import happened
from zbv_service.database import DatabaseAway, Keep, Retention

SWEEP_SECONDS = 600.0
STOP_SECONDS = 5.0

logger = logging.getLogger(__name__)


class Sweeper:
    """Sweeps between :meth:`start` and :meth:`stop`.

    Parameters
    ----------
    used
        Ids of plans fetched since the last sweep; a sweep records these uses and empties the set.
    """

    def __init__(self, retention: Retention, keep: Keep, used: set[str]):
        self._retention = retention
        self._keep = keep
        self._used = used
        self._stopped = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin."""
        self._loop = asyncio.create_task(self._forever(), name="zbv-sweeper")

    async def stop(self) -> None:
        """Stop after the current batch."""
        self._stopped.set()
        if self._loop is not None:
            await asyncio.wait([self._loop], timeout=STOP_SECONDS)
            self._loop.cancel()

    async def sweep(self) -> None:
        """Record which plans were fetched, and remove old rows."""
        noted = frozenset(self._used)
        await self._retention.note_uses(noted)
        self._used -= noted
        gone = await self._retention.sweep(self._keep, self._stopped.is_set)
        if gone:
            logger.info("removed old rows: %s", ", ".join(f"{n} {kind}" for kind, n in gone.items()))

    async def _forever(self) -> None:
        while not self._stopped.is_set():
            try:
                await self.sweep()
            except DatabaseAway as error:
                logger.warning("%s Old rows are removed later.", error)
            except Exception:
                logger.exception("could not remove old rows; trying again in %g s", SWEEP_SECONDS)
            await happened(self._stopped, SWEEP_SECONDS)
