"""Wakes agents that wait for work; one query serves all of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from zbv_service.compute.waiting import happened
from zbv_service.database import DatabaseAway, RunTable
from zbv_service.runs.dispatch import Dispatcher

POLL_SECONDS = 1.0
"""Seconds between queries for work that another service assigned."""

logger = logging.getLogger(__name__)


class Assignments:
    """The agents that wait for work at this service."""

    def __init__(self, runs: RunTable, dispatcher: Dispatcher):
        self._runs = runs
        self._dispatcher = dispatcher
        self._waiting: dict[str, set[asyncio.Event]] = {}
        self._looker: asyncio.Task[None] | None = None

    @contextmanager
    def expected(self, agent_id: str) -> Iterator[asyncio.Event]:
        """Within the block, an event that is set when an agent may have work, or when the service stops."""
        event = asyncio.Event()
        self._waiting.setdefault(agent_id, set()).add(event)
        if self._looker is None or self._looker.done():
            self._looker = asyncio.create_task(self._look_on(), name="zbv-waiting-agents")
        try:
            yield event
        finally:
            events = self._waiting[agent_id]
            events.discard(event)
            if not events:
                del self._waiting[agent_id]

    async def _look_on(self) -> None:
        while self._waiting:
            rung = self._dispatcher.assigned  # taken first, to notice assignments during the query
            if self._dispatcher.is_stopping:
                self._wake(list(self._waiting))
                return
            try:
                self._wake(await self._runs.with_work(list(self._waiting)))
            except DatabaseAway as error:
                logger.warning("%s Agents continue to wait for work.", error)
            await happened(rung, POLL_SECONDS)

    def _wake(self, agent_ids: list[str]) -> None:
        for agent_id in agent_ids:
            for event in self._waiting.get(agent_id, ()):
                event.set()
