"""The plans of runs: taking the plan of a search, changing to another plan, and the state of replanning.

Every change locks the run's row and checks its state again; see
:mod:`zbv_service.database.run_end`.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import select

from zbv_service.database.engine import BaseTable
from zbv_service.database.models import RunRow, SearchRow
from zbv_service.database.run_end import add_event, end_run, lock_run
from zbv_service.errors import RUN_FAILED, error_document
from zbv_service.records.runs import RUN_ENDED, OfferDocument, Replanning
from zbv_service.records.searches import FINISHED

_CONSIDERED = 200
"""Runs per pass."""


class RunPlanTable(BaseTable):
    """The plans of the runs in one database."""

    async def settle_planned(self) -> tuple[int, int]:
        """Advance runs that waited for a search which has ended: they wait for agents now, or fail.

        Returns the number of advanced runs, and of runs that still wait for a search.
        """
        query = select(RunRow.id, SearchRow.state).join(SearchRow, RunRow.search_id == SearchRow.id)
        query = query.where(RunRow.state == "planning").order_by(RunRow.created_at).limit(_CONSIDERED)
        found = await self._database.rows(query)
        ended = [run_id for run_id, state in found if state in FINISHED]
        for run_id in ended:
            await self._settle(run_id)
        return len(ended), len(found) - len(ended)

    async def _settle(self, run_id: str) -> None:
        async with self._database.writing() as session:
            run = await lock_run(session, run_id)
            if run is None or run.state != "planning":
                return
            search = await session.get(SearchRow, run.search_id)
            if search is None or search.plan_id is None:
                end_run(session, run, "failed", _error_of(search))
                return
            run.plan_id, run.state, run.updated_at = search.plan_id, "waiting", datetime.now(UTC)
            add_event(session, run_id, "planned", f"plan {search.plan_id}")
            add_event(session, run_id, "waiting", f"for {run.nodes} agents")

    async def replanned(self) -> list[str]:
        """Active runs that want to be replanned when their measured costs drift."""
        wanted = RunRow.options["replan"].as_string().in_(["auto", "ask"])
        query = select(RunRow.id).where(RunRow.state == "running", wanted)
        found = await self._database.rows(query.order_by(RunRow.created_at).limit(_CONSIDERED))
        return [run_id for (run_id,) in found]

    async def remember(self, run_id: str, before: Replanning | None, after: Replanning) -> bool:
        """Store the state of replanning; False if another service has changed it in the meantime."""
        async with self._database.writing() as session:
            run = await lock_run(session, run_id)
            if run is None or run.replanning != (None if before is None else before.model_dump()):
                return False
            run.replanning = after.model_dump()
            if after.is_open:
                add_event(session, run_id, "replan", f"measured costs differ; search {after.search_id}")
            return True

    async def offer(
        self, run_id: str, before: Replanning, after: Replanning, offer: OfferDocument, *, take: bool
    ) -> bool:
        """Record that a search found a better plan, and change to it if the run accepts it.

        Returns False if the run has changed in the meantime.
        """
        async with self._database.writing() as session:
            run = await lock_run(session, run_id)
            if run is None or run.state in RUN_ENDED or run.plan_id != before.plan_id:
                return False
            if run.replanning != before.model_dump():
                return False
            run.replanning, run.offer = after.model_dump(), offer.model_dump()
            run.updated_at = datetime.now(UTC)
            gain = 1 - offer.objective_then / offer.objective_now
            said = f"plan {offer.plan_id} is {gain:.1%} better under the measured costs"
            add_event(session, run_id, "offer", said)
            if take:
                run.target_plan_id = offer.plan_id
            return True

    async def change(self, run_id: str, plan_id: str) -> bool:
        """Change the plan of a run; False if it has no plan yet or has ended.

        A run that waits for agents gets the plan at once, any other run from its next step on.
        """
        async with self._database.writing() as session:
            run = await lock_run(session, run_id)
            if run is None or run.plan_id is None or run.state in RUN_ENDED:
                return False
            run.updated_at = datetime.now(UTC)
            if run.state == "waiting" and plan_id != run.plan_id:
                run.plan_id, run.offer = plan_id, None
                add_event(session, run_id, "plan", f"plan {plan_id}")
            elif (run.target_plan_id or run.plan_id) != plan_id:
                add_event(session, run_id, "plan", f"is to change over to plan {plan_id}")
                run.target_plan_id = plan_id
            return True


def _error_of(search: SearchRow | None) -> dict[str, Any]:
    if search is not None and search.error is not None:
        return search.error
    detail = "The search for its plan was cancelled before it found one. Submit the run again."
    return error_document(RUN_FAILED, detail)
