"""Checks whether the service can work: the database answers, and the loops for searches and runs work."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping

from zbv_service.database import Database, DatabaseAway
from zbv_service.runs.dispatch import Dispatcher
from zbv_service.searches.runner import Runner

PING_SECONDS = 5.0
FRESH_SECONDS = 1.0
"""Seconds for which a result of the database's check is reused."""

logger = logging.getLogger(__name__)


class Readiness:
    """Checks for any number of requests; only changes are logged.

    Requests need no token, so they must not take database connections from other requests: one ping serves
    all requests within :data:`FRESH_SECONDS`.
    """

    def __init__(self, database: Database, runner: Runner, dispatcher: Dispatcher):
        self._pinging: asyncio.Task[str | None] | None = None
        self._fresh_until = -math.inf
        self._database = database
        self._runner = runner
        self._dispatcher = dispatcher
        self._failing: frozenset[str] = frozenset()

    async def failed_checks(self) -> dict[str, str]:
        """The checks that fail, ``database``, ``searches`` and ``runs``, and why; empty if it is ready."""
        now = asyncio.get_running_loop().time()
        if self._pinging is None or (self._pinging.done() and now >= self._fresh_until):
            self._pinging = asyncio.create_task(self._ping())
        # The task is shared: a request that is cancelled must not cancel it.
        trouble = await asyncio.shield(self._pinging)
        failed = {}
        if trouble is not None:
            what = "cannot be written" if trouble.startswith("Writing fails") else "does not answer"
            failed["database"] = f"The database {what}; the log says why."
        if not self._runner.is_working:
            failed["searches"] = "Searches are not run: the service starts or stops."
        elif self._runner.trouble is not None:
            failed["searches"] = f"Searches wait: {self._runner.trouble}"
        if not self._dispatcher.is_working:
            failed["runs"] = "Runs are not advanced: the service starts or stops."
        self._log(failed, trouble)
        return failed

    async def _ping(self) -> str | None:
        """Why the database does not answer or cannot be written, None if all is well."""
        try:
            async with asyncio.timeout(PING_SECONDS):
                await self._database.ping()
        except TimeoutError:
            return f"The database does not answer within {PING_SECONDS:g} s."
        except DatabaseAway as error:
            return " ".join(str(error).split())  # drivers write paragraphs
        finally:
            self._fresh_until = asyncio.get_running_loop().time() + FRESH_SECONDS
        return None

    def _log(self, failed: Mapping[str, str], trouble: str | None) -> None:
        failing = frozenset(failed)
        if failing and failing != self._failing:
            # Clients do not see the reason why the database is away; the log does.
            details = [trouble if check == "database" else detail for check, detail in failed.items()]
            logger.warning("not ready (%s): %s", ", ".join(sorted(failing)), " ".join(map(str, details)))
        elif self._failing and not failing:
            logger.info("ready again")
        self._failing = failing
