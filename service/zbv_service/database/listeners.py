"""Records since when each service has listened to agents without a pause.

An agent's silence is evidence only if every service listened all the time: its heartbeats may be waiting at a
service that is stopped or overloaded. All times come from the database's clock, and all services judge by the
same rows, so they reach the same decision.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from sqlalchemy import delete, select

from zbv_service.database.engine import BaseTable
from zbv_service.database.run_models import ListenerRow

_REMEMBERED = 4
"""A service that stays away for this many agent timeouts is forgotten."""


class ListenerTable(BaseTable):
    """The services that listen to the agents of one database."""

    async def look(self, listener_id: str, silence: timedelta, *, paused: bool) -> datetime | None:
        """Record that a service listens, and return the moment before which a silent agent was last seen.

        Parameters
        ----------
        silence
            How long an agent may be silent before it is lost.
        paused
            Whether this service has just been late, so it may not have read what agents sent.

        Returns
        -------
        None while a service may be the reason for silence: this service or another one has listened for less
        than ``silence`` since its last pause.
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
                mine.listening_since = now  # the database was away, or its clock was changed
            mine.looked_at = now
            await session.flush()
            others = await session.scalars(select(ListenerRow))
            return now - silence if now - _all_since(others, now, silence) >= silence else None


def _all_since(listeners: Iterable[ListenerRow], now: datetime, silence: timedelta) -> datetime:
    """The moment since which every service has listened.

    A late service counts as paused until its agents have had time to reach another service.
    """
    return max(
        row.listening_since if now - row.looked_at <= silence / 2 else row.looked_at + silence
        for row in listeners
    )
