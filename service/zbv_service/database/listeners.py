"""Since when the services on a database have listened to agents without a pause.

Each service notes when it looks. An agent's silence says something about the agent only while every service
listened: heartbeats may wait in front of one that is stopped or overloaded. All moments are the database's,
and all services judge from the same rows, so they come to the same decision.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from sqlalchemy import delete, select

from zbv_service.database.engine import Database
from zbv_service.database.run_models import ListenerRow

_REMEMBERED = 4
"""Timeouts of agents after which a service that does not come back is forgotten."""


class ListenerTable:
    """The services that listen to the agents of one database."""

    def __init__(self, database: Database):
        self._database = database

    async def look(self, listener_id: str, silence: timedelta, *, paused: bool) -> datetime | None:
        """Note that a service listens, and return before when a silent agent was last seen.

        Parameters
        ----------
        silence
            How long an agent may be silent.
        paused
            Whether the service knows that it has just been late: it may not have read what agents sent.

        Returns
        -------
        None while the silence of agents may be the fault of a service: this one or another has listened for
        less than ``silence`` since its last pause.
        """
        async with self._database.writing() as session:
            now = await self._database.now(session)
            await session.execute(
                delete(ListenerRow).where(
                    ListenerRow.id != listener_id, ListenerRow.looked_at < now - _REMEMBERED * silence
                )
            )
            mine = await session.get(ListenerRow, listener_id)
            if mine is None:
                mine = ListenerRow(id=listener_id, looked_at=now, listening_since=now)
                session.add(mine)
            elif paused or not timedelta(0) <= now - mine.looked_at <= silence / 2:
                mine.listening_since = now  # the database was away, or somebody set its clock
            mine.looked_at = now
            await session.flush()
            others = await session.scalars(select(ListenerRow))
            return now - silence if now - _all_since(others, now, silence) >= silence else None


def _all_since(listeners: Iterable[ListenerRow], now: datetime, silence: timedelta) -> datetime:
    """The moment since which every service listens.

    One that is late counts as paused until its agents have had time to turn to another service.
    """
    return max(
        row.listening_since if now - row.looked_at <= silence / 2 else row.looked_at + silence
        for row in listeners
    )
