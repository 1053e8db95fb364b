"""How a generation of a run ends: when every one of its nodes has, and why; and whether there is another.

A failure stops the other nodes, but the generation has not failed before they have all told their story: the
first to report is often the one that lost a peer, not the peer.

Rows are locked in one order everywhere, or two transactions would wait for each other: a run first, then its
nodes, then agents; several runs or agents of one transaction by their ids.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, cast

from sqlalchemy import CursorResult, select, update
from sqlalchemy import Update as UpdateStatement
from sqlalchemy.ext.asyncio import AsyncSession

from zbv_service.database.run_models import AgentRow, EventRow, NodeRow, RunRow
from zbv_service.http import problems
from zbv_service.runs.records import (
    DEFAULT_RETRIES,
    FAILURE_KINDS,
    FINAL_FAILURES,
    RUN_ENDED,
    NodeOutcome,
    RunState,
)


async def lock_run(session: AsyncSession, run_id: str) -> RunRow | None:
    """A run that nobody else changes until the transaction ends."""
    query = select(RunRow).where(RunRow.id == run_id).with_for_update()
    return await session.scalar(query.execution_options(populate_existing=True))


async def nodes_of(session: AsyncSession, run: RunRow) -> list[NodeRow]:
    """The nodes of a run's current generation, by node rank."""
    query = select(NodeRow).where(NodeRow.run_id == run.id, NodeRow.generation == run.generation)
    return list(await session.scalars(query.order_by(NodeRow.node_rank)))


async def node_of(session: AsyncSession, run: RunRow, agent_id: str) -> NodeRow | None:
    """The node that an agent has in a run's current generation: one row, however large the run is."""
    of_it = (NodeRow.agent_id == agent_id, NodeRow.run_id == run.id, NodeRow.generation == run.generation)
    query = select(NodeRow).where(*of_it).order_by(NodeRow.node_rank.desc()).limit(1)
    return await session.scalar(query.execution_options(populate_existing=True))


async def end_node(
    session: AsyncSession,
    run: RunRow,
    node: NodeRow,
    outcome: NodeOutcome,
    failures: list[dict[str, Any]],
) -> None:
    """End a node's part, give its agent back, and stop, end or begin anew the run as that demands.

    ``run`` is locked. A node that has ended stays as it is.
    """
    if node.state == "ended":
        return
    now = datetime.now(UTC)
    where = {"node_rank": node.node_rank, "agent": node.agent_name}
    node.state, node.outcome, node.ended_at = "ended", outcome, now
    node.failures = [{**where, **failure} for failure in failures]
    await session.execute(
        update(AgentRow).where(AgentRow.id == node.agent_id, AgentRow.run_id == run.id).values(run_id=None)
    )
    for failure in failures:
        said = f"node {node.node_rank} ({node.agent_name}): {failure['detail']}"
        add_event(session, run.id, "failure", said)
    if outcome != "succeeded":
        run.stop_requested = True
    run.updated_at = now
    await session.flush()
    if run.state in RUN_ENDED or await _goes_on(session, run):
        return
    _end_generation(session, run, await nodes_of(session, run))


async def _goes_on(session: AsyncSession, run: RunRow) -> bool:
    """Whether a node of a locked run's generation has not ended; its nodes are read once, when all have."""
    open_node = select(NodeRow.node_rank).where(
        NodeRow.run_id == run.id, NodeRow.generation == run.generation, NodeRow.state != "ended"
    )
    return await session.scalar(open_node.limit(1)) is not None


def add_event(session: AsyncSession, run_id: str, kind: str, detail: str) -> None:
    """Note what happened to a run."""
    session.add(EventRow(run_id=run_id, at=datetime.now(UTC), kind=kind, detail=detail))


async def changed(session: AsyncSession, statement: UpdateStatement) -> int:
    """How many rows a statement changed."""
    return cast("CursorResult[Any]", await session.execute(statement)).rowcount


def end_run(session: AsyncSession, run: RunRow, state: RunState, error: dict[str, Any] | None = None) -> None:
    """A locked run's last state."""
    run.state, run.error = state, error
    run.finished_at = run.updated_at = datetime.now(UTC)
    run.offer = run.target_plan_id = None
    add_event(session, run.id, state, "" if error is None else str(error["detail"]))


def change_plan(session: AsyncSession, run: RunRow, plan_id: str, detail: str) -> None:
    """A locked run has another plan from now on."""
    before = run.plan_id or ""
    run.plan_id, run.target_plan_id, run.offer = plan_id, None, None
    add_event(session, run.id, "swapped", f"from plan {before[:12]} to {plan_id[:12]}, {detail}")


def _end_generation(session: AsyncSession, run: RunRow, nodes: list[NodeRow]) -> None:
    if all(node.outcome == "succeeded" for node in nodes):
        end_run(session, run, "succeeded")
    elif run.cancel_requested:
        end_run(session, run, "cancelled")
    else:
        failures = [failure for node in nodes for failure in node.failures]
        error, retries = _error_of(failures), int(run.options.get("retries", DEFAULT_RETRIES))
        is_final = any(failure["kind"] in FINAL_FAILURES for failure in failures)
        if is_final or run.generation >= retries:
            end_run(session, run, "failed", error)
        else:
            _begin_anew(session, run, retries, str(error["detail"]))


def _begin_anew(session: AsyncSession, run: RunRow, retries: int, why: str) -> None:
    """Have a locked run wait for agents again; its ranks resume from their last checkpoint by themselves."""
    run.state, run.stop_requested = "waiting", False
    run.generation += 1
    add_event(session, run.id, "retry", f"retry {run.generation} of {retries} after: {why}")
    if run.target_plan_id is not None:
        change_plan(session, run, run.target_plan_id, f"from the start of generation {run.generation}")


def _error_of(failures: list[dict[str, Any]]) -> dict[str, Any]:
    """The failures, causes before consequences; the first speaks for the run."""
    ordered = sorted(failures, key=lambda failure: FAILURE_KINDS.index(failure["kind"]))
    detail = str(ordered[0]["detail"]) if ordered else "The nodes were stopped; no failure was reported."
    return problems.document(problems.RUN_FAILED, detail, failures=ordered)
