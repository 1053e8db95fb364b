"""Declares silent agents lost, unless the service itself was paused and could not receive heartbeats."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from datetime import timedelta

from zbv_service.database import AgentTable, ListenerTable

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
