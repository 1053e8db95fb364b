"""Counts searches, agents and runs by state for the metrics, using indexes only."""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from zbv_service.database.engine import Database
from zbv_service.database.models import AgentRow, RunRow, SearchRow
from zbv_service.observability.metrics import Tally
from zbv_service.records.agents import AGENT_STATES
from zbv_service.records.runs import RUN_STATES
from zbv_service.records.searches import SEARCH_STATES


async def tally(database: Database) -> Tally:
    """The number of searches, agents and runs in every state, zeros included; and the age of the queue."""
    oldest = select(func.min(SearchRow.created_at)).where(SearchRow.state == "queued")

    def count(session: Session) -> Tally:
        since, now = session.scalar(oldest), session.execute(select(database.clock)).scalar_one()
        return Tally(
            searches=_by_state(session, SearchRow, SEARCH_STATES),
            agents=_by_state(session, AgentRow, AGENT_STATES),
            runs=_by_state(session, RunRow, RUN_STATES),
            queue_age=0.0 if since is None else max(0.0, (now - since).total_seconds()),
        )

    return await database.read(count)


def _by_state(
    session: Session, table: type[SearchRow] | type[AgentRow] | type[RunRow], states: tuple[str, ...]
) -> dict[str, int]:
    counted = session.execute(select(table.state, func.count()).group_by(table.state))
    return {**dict.fromkeys(states, 0), **{row[0]: row[1] for row in counted}}
