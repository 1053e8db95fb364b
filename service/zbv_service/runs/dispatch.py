"""Advances runs: takes plans from their searches, assigns agents, and notices lost agents.

The database is the source of truth: several services may do this at once, and any of them may crash.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from zbv_service.compute.waiting import Loops, happened
from zbv_service.database import AgentsTaken, AgentTable, DatabaseAway, ListenerTable, RunPlanTable, RunTable
from zbv_service.runs.replanner import Replanner
from zbv_service.runs.scheduler import decide
from zbv_service.settings import Settings

LOOKS = 10
"""Checks within the time that an agent may be silent."""
_LATE_SHARE, _LATE_SECONDS = 1 / 20, 1.0
"""A check that is later than both, a share of the timeout and seconds, shows that the process was paused."""

logger = logging.getLogger(__name__)


class AgentWatch:
    """Declares agents lost; several services may share a database.

    Parameters
    ----------
    timeout
        Seconds after which a silent agent is lost.
    clock
        Seconds; the clock must continue while the process is stopped.
    """

    def __init__(
        self,
        agents: AgentTable,
        listeners: ListenerTable,
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._agents = agents
        self._listeners = listeners
        self._timeout = timeout
        self._clock = clock
        self._id = uuid.uuid4().hex
        self._due: float | None = None

    @property
    def interval(self) -> float:
        """Seconds between two checks."""
        return self._timeout / LOOKS

    async def look(self) -> list[str]:
        """Check once, and return the ids of the agents that are lost now.

        Call it every :attr:`interval` seconds. A late call means that the whole service was late: waiting
        heartbeats must be read before any agent is declared lost.

        Raises
        ------
        DatabaseAway
            The database does not answer.
        """
        now = self._clock()
        was_late = self._due is not None and now - self._due > max(_LATE_SECONDS, _LATE_SHARE * self._timeout)
        self._due = now + self.interval
        if was_late:
            logger.warning("the service was late: no agent is lost in the next %g s", self._timeout)
        before = await self._listeners.look(self._id, timedelta(seconds=self._timeout), paused=was_late)
        lost = [] if before is None else await self._agents.lose(self._timeout, before)
        for agent in lost:
            logger.warning("agent %s (%s) is lost", agent.name, agent.id)
        return [agent.id for agent in lost]


POLL_SECONDS = 1.0
"""Seconds between passes over waiting runs if nothing wakes the dispatcher."""
_PLANNING_SECONDS = 0.2
"""Seconds between passes while a run waits for a search, which may end in another service."""


class Dispatcher:
    """Runs the loops between :meth:`start` and :meth:`stop`.

    Attributes
    ----------
    assigned
        Set, and replaced by a new event, when agents got work.
    replanner
        Its step is one of the loops.
    """

    def __init__(
        self,
        runs: RunTable,
        run_plans: RunPlanTable,
        replanner: Replanner,
        watch: AgentWatch,
        settings: Settings,
    ):
        self._runs = runs
        self._run_plans = run_plans
        self.replanner = replanner
        self._watch = watch
        self._settings = settings
        self._changed = asyncio.Event()
        self._submitted = asyncio.Event()
        self._loops = Loops(DatabaseAway, POLL_SECONDS)
        self.assigned = asyncio.Event()

    @property
    def is_stopping(self) -> bool:
        """Whether the service is stopping, so that no request may wait."""
        return self._loops.stopped.is_set()

    @property
    def is_working(self) -> bool:
        """Whether all loops are alive."""
        return self._loops.is_working

    async def start(self) -> None:
        """Start the loops."""
        steps = {"assignments": self._assign, "agents": self._watch_agents}
        self._loops.start({**steps, "plans": self._take_plans, "replanning": self._replan})

    def hang_up(self) -> None:
        """Answer all agents that wait for work, because the service is stopping."""
        self._loops.stopped.set()
        self._changed.set()
        self._submitted.set()
        self._ring()

    async def stop(self) -> None:
        """Wait until the loops end, so that no transaction is interrupted."""
        self.hang_up()
        await self._loops.stop(self._settings.shutdown_seconds)

    def wake(self) -> None:
        """Look for work at once: a run was submitted or an agent became free."""
        self._changed.set()
        self._submitted.set()

    async def _assign(self) -> None:
        self._changed.clear()
        with suppress(AgentsTaken):  # by another service; the next pass sees the remaining ones
            started = await self._runs.assign(decide)
            for run_id in started:
                logger.info("run %s has its agents", run_id)
            if started:
                self._ring()
        await happened(self._changed, POLL_SECONDS)

    async def _take_plans(self) -> None:
        """Advance runs whose search has ended."""
        self._submitted.clear()
        moved, waiting = await self._run_plans.settle_planned()
        if moved:
            self._changed.set()
        await happened(self._submitted, _PLANNING_SECONDS if waiting else POLL_SECONDS)

    async def _replan(self) -> None:
        await self.replanner.step()
        await happened(self._loops.stopped, POLL_SECONDS)

    async def _watch_agents(self) -> None:
        await self._watch.look()
        await happened(self._loops.stopped, self._watch.interval)

    def _ring(self) -> None:
        rung, self.assigned = self.assigned, asyncio.Event()
        rung.set()
