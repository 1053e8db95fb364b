"""Ends a generation of a run once all of its nodes have ended, and decides whether another one follows.

A failure stops the other nodes, but the generation fails only after all of them have reported: the first
report often comes from a rank that lost its peer, and not from the peer.

All code locks rows in the same order, which prevents deadlocks: a run first, then its nodes, then agents;
several runs or agents in one transaction by id.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, cast

from sqlalchemy import ColumnElement, CursorResult, Select, insert, select, update
from sqlalchemy import Update as UpdateStatement
from sqlalchemy.ext.asyncio import AsyncSession

from zbv_service.database.models import AgentRow, EventRow, NodeRow, RunRow
from zbv_service.errors import RUN_FAILED, error_document
from zbv_service.records.run_options import DEFAULT_RETRIES
from zbv_service.records.runs import FAILURE_KINDS, FINAL_FAILURES, RUN_ENDED, NodeOutcome, RunState, place_of

MOST_FAILURES = 100
"""Most failures of a generation in the run's error, which every list has; its events have all."""
MOST_MESSAGE = 1000
"""Most characters of a failure or refusal that a run keeps of each generation."""
_AT_ONCE = 50
"""Events that are stored with one statement; the event loop answers others between two statements."""
_RANK = re.compile(r"rank (\d+)\b:? ?")
"""How the detail of a failure may begin."""


async def lock_run(session: AsyncSession, run_id: str) -> RunRow | None:
    """Lock a run until the transaction ends, and return it."""
    query = select(RunRow).where(RunRow.id == run_id).with_for_update()
    return await session.scalar(query.execution_options(populate_existing=True))


@dataclass
class _Failures:
    """What the failed nodes of a generation have reported."""

    count: int = 0
    causes: list[dict[str, Any]] = field(default_factory=list)
    """At most :data:`MOST_FAILURES`, causes first."""
    refusals: list[dict[str, Any]] = field(default_factory=list)
    is_final: bool = False
    """Whether another generation would fail in the same way."""

    def add(self, run: RunRow, agent_id: str, agent: str, failures: list[dict[str, Any]]) -> None:
        """Add the report of an agent's node; nodes come in the order of their ranks."""
        self.count += len(failures)
        self.causes = sorted([*self.causes, *failures], key=_place_of_cause)[:MOST_FAILURES]
        self.is_final |= any(failure["kind"] in FINAL_FAILURES for failure in failures)
        refused = [failure["detail"] for failure in failures if failure["kind"] == "refused"]
        if refused:
            self.refusals.append(_refusal(run, agent_id, agent, refused[0]))


async def _failures_of(session: AsyncSession, run: RunRow) -> _Failures:
    """The failures of a run's current generation.

    Thousands of ranks may have failed, so this reads one node at a time: others get their turn in between.
    """
    failed = _nodes_of(run, NodeRow.outcome != "succeeded").with_only_columns(NodeRow.node_rank)
    reported = _Failures()
    for node_rank in list(await session.scalars(failed.order_by(NodeRow.node_rank))):
        columns = (NodeRow.agent_id, NodeRow.agent_name, NodeRow.failures)
        report = _nodes_of(run, NodeRow.node_rank == node_rank).with_only_columns(*columns)
        reported.add(run, *(await session.execute(report)).one())
    return reported


def _nodes_of(run: RunRow, *conditions: ColumnElement[bool]) -> Select[NodeRow]:
    """A query for nodes of a run's current generation."""
    return select(NodeRow).where(NodeRow.run_id == run.id, NodeRow.generation == run.generation, *conditions)


async def node_of(session: AsyncSession, run: RunRow, agent_id: str) -> NodeRow | None:
    """The node of an agent in a run's current generation; reads one row for a run of any size."""
    return await session.scalar(nodes_of_agent(run, agent_id).execution_options(populate_existing=True))


def nodes_of_agent(run: RunRow, agent_id: str) -> Select[NodeRow]:
    """A query for the node of an agent in a run's current generation."""
    return _nodes_of(run, NodeRow.agent_id == agent_id).order_by(NodeRow.node_rank.desc()).limit(1)


async def end_node(
    session: AsyncSession,
    run: RunRow,
    node: NodeRow,
    outcome: NodeOutcome,
    failures: list[dict[str, Any]],
) -> None:
    """End a node and release its agent; then stop, end or restart the run as needed.

    The caller holds the lock on ``run``. A node that has already ended stays unchanged.
    """
    if node.state == "ended":
        return
    now = datetime.now(UTC)
    node.state, node.outcome, node.ended_at = "ended", outcome, now
    last = {place.get("rank"): place for place in node.ranks}
    node.failures = [_placed(node, failure, last.get(failure.get("rank"), {})) for failure in failures]
    await session.execute(
        update(AgentRow).where(AgentRow.id == node.agent_id, AgentRow.run_id == run.id).values(run_id=None)
    )
    # Ranks that are stopped because somebody cancelled the run may lose their peers: that is no failure.
    told_of = [] if run.cancel_requested else node.failures
    for begin in range(0, len(told_of), _AT_ONCE):
        told = map(_told, told_of[begin : begin + _AT_ONCE])
        events = [{"run_id": run.id, "at": now, "kind": "failure", "detail": detail} for detail in told]
        await session.execute(insert(EventRow), events)
    if outcome != "succeeded":
        run.stop_requested = True
    run.updated_at = now
    await session.flush()
    if run.state in RUN_ENDED or await _goes_on(session, run):
        return
    await _end_generation(session, run)


async def _goes_on(session: AsyncSession, run: RunRow) -> bool:
    """Whether some node of a locked run's current generation has not ended. Does not read all nodes."""
    open_node = _nodes_of(run, NodeRow.state != "ended").with_only_columns(NodeRow.node_rank)
    return await session.scalar(open_node.limit(1)) is not None


def add_event(session: AsyncSession, run_id: str, kind: str, detail: str) -> None:
    """Add an event to a run."""
    session.add(EventRow(run_id=run_id, at=datetime.now(UTC), kind=kind, detail=detail))


async def changed(session: AsyncSession, statement: UpdateStatement) -> int:
    """Execute a statement, and return the number of rows it changed."""
    return cast("CursorResult[Any]", await session.execute(statement)).rowcount


def end_run(session: AsyncSession, run: RunRow, state: RunState, error: dict[str, Any] | None = None) -> None:
    """Set the final state of a locked run."""
    run.state, run.error, run.waits_for = state, error, None
    run.finished_at = run.updated_at = datetime.now(UTC)
    run.offer = run.target_plan_id = None
    add_event(session, run.id, state, "" if error is None else str(error["detail"]))


def change_plan(session: AsyncSession, run: RunRow, plan_id: str, detail: str) -> None:
    """Set another plan for a locked run."""
    before = run.plan_id or ""
    run.plan_id, run.target_plan_id, run.offer = plan_id, None, None
    add_event(session, run.id, "swapped", f"from plan {before[:12]} to {plan_id[:12]}, {detail}")


async def _end_generation(session: AsyncSession, run: RunRow) -> None:
    unsuccessful = _nodes_of(run, NodeRow.outcome != "succeeded").with_only_columns(NodeRow.node_rank)
    if await session.scalar(unsuccessful.limit(1)) is None:
        end_run(session, run, "succeeded")
    elif run.cancel_requested:
        end_run(session, run, "cancelled")
    else:
        _end_failed(session, run, await _failures_of(session, run))


def _end_failed(session: AsyncSession, run: RunRow, reported: _Failures) -> None:
    """Fail a locked run, or let it wait for agents again; agents that refused it are excluded."""
    if reported.refusals and not reported.is_final:
        run.refusals = [*run.refusals, *reported.refusals]
        names = ", ".join(refusal["agent"] for refusal in reported.refusals)
        _wait_again(session, run, "refused", f"by {names}; the run waits for other agents")
        return
    if reported.causes:
        run.failures = [*run.failures, _cause(run, reported)]
    error, retries = _error_of(reported), int(run.options.get("retries", DEFAULT_RETRIES))
    tried = run.generation - len({refusal["generation"] for refusal in run.refusals})
    if reported.is_final or tried >= retries:
        end_run(session, run, "failed", error)
    else:
        _wait_again(session, run, "retry", f"retry {tried + 1} of {retries} after: {error['detail']}")


def _wait_again(session: AsyncSession, run: RunRow, kind: str, detail: str) -> None:
    """Let a locked run wait for agents again; its ranks resume from their last checkpoint."""
    run.state, run.stop_requested = "waiting", False
    run.generation += 1
    add_event(session, run.id, kind, detail)
    if run.target_plan_id is not None:
        change_plan(session, run, run.target_plan_id, f"from the start of generation {run.generation}")


def _refusal(run: RunRow, agent_id: str, agent: str, detail: str) -> dict[str, Any]:
    """The record of an agent that refused a run."""
    return {
        "generation": run.generation,
        "at": datetime.now(UTC).isoformat(),
        "agent_id": agent_id,
        "agent": agent,
        "message": detail[:MOST_MESSAGE],
    }


def _cause(run: RunRow, reported: _Failures) -> dict[str, Any]:
    """The record of a failed generation: its first cause and the number of failures that followed."""
    first = reported.causes[0]
    kept = ("kind", "node_rank", "agent", "rank", "step", "action", "peer", "last_step", "last_action")
    return {
        "generation": run.generation,
        "at": datetime.now(UTC).isoformat(),
        **{name: first.get(name) for name in kept},
        "message": first["detail"][:MOST_MESSAGE],
        "consequences": reported.count - 1,
    }


def _placed(node: NodeRow, failure: dict[str, Any], last: dict[str, Any]) -> dict[str, Any]:
    """A failure with its node and the last place that its rank reported, which may lag behind."""
    return {
        "node_rank": node.node_rank,
        "agent": node.agent_name,
        "last_step": last.get("step"),
        "last_action": last.get("action"),
        **failure,
    }


def _told(failure: dict[str, Any]) -> str:
    """The text of a failure for an event: its place, then its detail, which may begin with the rank, too."""
    where = place_of(failure)
    detail, begin = failure["detail"], _RANK.match(failure["detail"])
    if begin and begin[1] == str(failure.get("rank")):
        detail = detail[begin.end() :]
    at = f"node {failure['node_rank']} ({failure['agent']})"
    return f"{at}{', ' if where else ''}{where}: {detail}"


def _place_of_cause(failure: dict[str, Any]) -> tuple[int, bool]:
    """Sorts failures by kind, causes first; within a kind, failures with a known step come first."""
    return FAILURE_KINDS.index(failure["kind"]), failure.get("step") is None


def _error_of(reported: _Failures) -> dict[str, Any]:
    """The run's error document; the first cause gives the detail."""
    shown = reported.causes
    detail = str(shown[0]["detail"]) if shown else "The nodes were stopped; no failure was reported."
    return error_document(RUN_FAILED, detail, failures=shown, failures_left_out=reported.count - len(shown))
