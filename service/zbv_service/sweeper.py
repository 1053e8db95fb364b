"""Now and then removes from the database what is older than its operator wants to keep."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime, timedelta

from zbv_service.database import DatabaseAway, Retention
from zbv_service.waiting import happened

SWEEP_SECONDS = 600.0
STOP_SECONDS = 5.0

logger = logging.getLogger(__name__)


class Sweeper:
    """Sweeps between :meth:`start` and :meth:`stop`.

    Parameters
    ----------
    keep_days
        How long what has ended is kept; None for ever.
    """

    def __init__(self, retention: Retention, keep_days: float | None):
        self._retention = retention
        self._keep_days = keep_days
        self._stopped = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin."""
        self._loop = asyncio.create_task(self._forever(), name="zbv-sweeper")

    async def stop(self) -> None:
        """Stop, after the portion that is being removed."""
        self._stopped.set()
        if self._loop is not None:
            await asyncio.wait([self._loop], timeout=STOP_SECONDS)
            self._loop.cancel()

    async def sweep(self) -> None:
        """Remove what is too old now."""
        await self._retention.forget_names()
        if self._keep_days is not None:
            before = datetime.now(UTC) - timedelta(days=self._keep_days)
            gone = await self._retention.forget(before, self._stopped.is_set)
            if gone.searches or gone.runs:
                logger.info(
                    "removed %d searches, and traces and logs of %d runs, that ended more than %g days ago",
                    gone.searches,
                    gone.runs,
                    self._keep_days,
                )

    async def _forever(self) -> None:
        while not self._stopped.is_set():
            try:
                await self.sweep()
            except DatabaseAway as error:
                logger.warning("%s What is old is removed later.", error)
            except Exception:
                logger.exception("what is old could not be removed; it is tried again in %g s", SWEEP_SECONDS)
            await happened(self._stopped, SWEEP_SECONDS)
