"""Whether the service can work: its database answers, and searches and runs are looked after."""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass

from zbv_service.database import Database, DatabaseAway
from zbv_service.runs.dispatch import Dispatcher
from zbv_service.searches.runner import Runner

PING_SECONDS = 5.0
FRESH_SECONDS = 1.0
"""How long what was found answers the next who ask."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FailedCheck:
    """What keeps the service from working: the check ``database``, ``searches`` or ``runs``, and why."""

    check: str
    detail: str


class Readiness:
    """Answers any number of requests; only changes are logged.

    Nobody needs a token to ask, so asking must not take connections to the database from those who work: one
    look answers all who ask within ``FRESH_SECONDS``.
    """

    def __init__(self, database: Database, runner: Runner, dispatcher: Dispatcher):
        self._pinging: asyncio.Task[str | None] | None = None
        self._fresh_until = -math.inf
        self._database = database
        self._runner = runner
        self._dispatcher = dispatcher
        self._failing: frozenset[str] = frozenset()

    async def failed_checks(self) -> list[FailedCheck]:
        """The checks that fail now, of the database a moment ago; none when the service is ready."""
        failed, reasons = [], []
        why = await self._why_database_is_away()
        if why is not None:
            failed.append(FailedCheck("database", "The database does not answer; the log says why."))
            reasons.append(why)
        if not self._runner.is_working:
            failed.append(FailedCheck("searches", "Searches are not run: the service starts or stops."))
        elif (trouble := self._runner.trouble) is not None:
            failed.append(FailedCheck("searches", f"Searches wait: {trouble}"))
        if not self._dispatcher.is_working:
            failed.append(FailedCheck("runs", "Runs are not looked after: the service starts or stops."))
        self._tell(failed, reasons)
        return failed

    async def _why_database_is_away(self) -> str | None:
        now = asyncio.get_running_loop().time()
        if self._pinging is None or (self._pinging.done() and now >= self._fresh_until):
            # A task of its own: a caller who goes away takes nothing from the others.
            self._pinging = asyncio.create_task(self._ping())
        return await asyncio.shield(self._pinging)

    async def _ping(self) -> str | None:
        try:
            return await self._reason()
        finally:
            self._fresh_until = asyncio.get_running_loop().time() + FRESH_SECONDS

    async def _reason(self) -> str | None:
        try:
            async with asyncio.timeout(PING_SECONDS):
                await self._database.ping()
        except TimeoutError:
            return f"The database does not answer within {PING_SECONDS:g} s."
        except DatabaseAway as error:
            return " ".join(str(error).split())  # drivers write paragraphs
        return None

    def _tell(self, failed: list[FailedCheck], reasons: list[str]) -> None:
        failing = frozenset(found.check for found in failed)
        if failing and failing != self._failing:
            known = [found.detail for found in failed if found.check != "database"]
            logger.warning("not ready (%s): %s", ", ".join(sorted(failing)), " ".join([*reasons, *known]))
        elif self._failing and not failing:
            logger.info("ready again")
        self._failing = failing
