"""Ends a generation of a run once all of its nodes have ended, and decides whether another one follows.

A failure stops the other nodes, but the generation fails only after all of them have reported: the first
report often comes from a rank that lost its peer, and not from the peer.

All code locks rows in the same order, which prevents deadlocks: a run first, then its nodes, then agents;
several runs or agents in one transaction by id.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, cast

from sqlalchemy import CursorResult, Select, select, update
from sqlalchemy import Update as UpdateStatement
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import defer

from zbv_service.database.run_models import AgentRow, EventRow, NodeRow, RunRow
from zbv_service.errors import RUN_FAILED, problem_document
from zbv_service.records.runs import (
    DEFAULT_RETRIES,
    FAILURE_KINDS,
    FINAL_FAILURES,
    RUN_ENDED,
    NodeOutcome,
    RunState,
    place_of,
)

MOST_FAILURES = 100
"""Most failures of a generation in the run's error, which every list has; its events have all."""
MOST_MESSAGE = 1000
"""Most characters of a failure or refusal that a run keeps of each generation."""


async def lock_run(session: AsyncSession, run_id: str) -> RunRow | None:
    """Lock a run until the transaction ends, and return it."""
    query = select(RunRow).where(RunRow.id == run_id).with_for_update()
    return await session.scalar(query.execution_options(populate_existing=True))


async def _nodes_of(session: AsyncSession, run: RunRow) -> list[NodeRow]:
    """The nodes of a run's current generation with their failures, in the order of node ranks."""
    query = select(NodeRow).where(NodeRow.run_id == run.id, NodeRow.generation == run.generation)
    query = query.order_by(NodeRow.node_rank).options(defer(NodeRow.ranks))
    nodes = list(await session.scalars(query))
    for node in nodes:  # one at a time, because thousands of reports take long to decode
        if node.outcome != "succeeded":
            await session.refresh(node, ["failures"])
    return nodes


async def node_of(session: AsyncSession, run: RunRow, agent_id: str) -> NodeRow | None:
    """The node of an agent in a run's current generation; reads one row for a run of any size."""
    return await session.scalar(nodes_of_agent(run, agent_id).execution_options(populate_existing=True))


def nodes_of_agent(run: RunRow, agent_id: str) -> Select[NodeRow]:
    """A query for the node of an agent in a run's current generation."""
    of_it = (NodeRow.agent_id == agent_id, NodeRow.run_id == run.id, NodeRow.generation == run.generation)
    return select(NodeRow).where(*of_it).order_by(NodeRow.node_rank.desc()).limit(1)


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
    node.failures = [_placed(node, failure) for failure in failures]
    await session.execute(
        update(AgentRow).where(AgentRow.id == node.agent_id, AgentRow.run_id == run.id).values(run_id=None)
    )
    for failure in node.failures:
        add_event(session, run.id, "failure", _told(failure))
    if outcome != "succeeded":
        run.stop_requested = True
    run.updated_at = now
    await session.flush()
    if run.state in RUN_ENDED or await _goes_on(session, run):
        return
    _end_generation(session, run, await _nodes_of(session, run))


async def _goes_on(session: AsyncSession, run: RunRow) -> bool:
    """Whether some node of a locked run's current generation has not ended. Does not read all nodes."""
    open_node = select(NodeRow.node_rank).where(
        NodeRow.run_id == run.id, NodeRow.generation == run.generation, NodeRow.state != "ended"
    )
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


def _end_generation(session: AsyncSession, run: RunRow, nodes: list[NodeRow]) -> None:
    if all(node.outcome == "succeeded" for node in nodes):
        end_run(session, run, "succeeded")
    elif run.cancel_requested:
        end_run(session, run, "cancelled")
    else:
        _end_failed(session, run, nodes)


def _end_failed(session: AsyncSession, run: RunRow, nodes: list[NodeRow]) -> None:
    """Fail a locked run, or let it wait for agents again; agents that refused it are excluded."""
    failed = [node for node in nodes if node.outcome != "succeeded"]
    failures = _causes_first(failure for node in failed for failure in node.failures)
    is_final = any(failure["kind"] in FINAL_FAILURES for failure in failures)
    refusals = [_refusal(run, node) for node in failed if _has_refused(node)]
    if refusals and not is_final:
        run.refusals = [*run.refusals, *refusals]
        names = ", ".join(refusal["agent"] for refusal in refusals)
        _wait_again(session, run, "refused", f"by {names}; the run waits for other agents")
        return
    if failures:
        run.failures = [*run.failures, _cause(run, failures)]
    error, retries = _error_of(failures), int(run.options.get("retries", DEFAULT_RETRIES))
    tried = run.generation - len({refusal["generation"] for refusal in run.refusals})
    if is_final or tried >= retries:
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


def _has_refused(node: NodeRow) -> bool:
    return any(failure["kind"] == "refused" for failure in node.failures)


def _refusal(run: RunRow, node: NodeRow) -> dict[str, Any]:
    """The record of an agent that refused a run."""
    (detail, *_) = (failure["detail"] for failure in node.failures if failure["kind"] == "refused")
    return {
        "generation": run.generation,
        "at": datetime.now(UTC).isoformat(),
        "agent_id": node.agent_id,
        "agent": node.agent_name,
        "message": detail[:MOST_MESSAGE],
    }


def _cause(run: RunRow, failures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The record of a failed generation: its first cause and the number of failures that followed."""
    first = failures[0]
    kept = ("kind", "node_rank", "agent", "rank", "step", "action", "peer", "last_step", "last_action")
    return {
        "generation": run.generation,
        "at": datetime.now(UTC).isoformat(),
        **{name: first.get(name) for name in kept},
        "message": first["detail"][:MOST_MESSAGE],
        "consequences": len(failures) - 1,
    }


def _placed(node: NodeRow, failure: dict[str, Any]) -> dict[str, Any]:
    """A failure with its node and the last place that its rank reported, which may lag behind."""
    rank = failure.get("rank")
    last: dict[str, Any] = next((place for place in node.ranks if place.get("rank") == rank), {})
    return {
        "node_rank": node.node_rank,
        "agent": node.agent_name,
        "last_step": last.get("step"),
        "last_action": last.get("action"),
        **failure,
    }


def _told(failure: dict[str, Any]) -> str:
    """The text of a failure for an event: its place, then its detail."""
    where = place_of(failure)
    at = f"node {failure['node_rank']} ({failure['agent']})"
    return f"{at}{', ' if where else ''}{where}: {failure['detail']}"


def _causes_first(failures: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort failures by kind, causes first; within a kind, failures with a known step come first."""

    def place(failure: dict[str, Any]) -> tuple[int, bool]:
        return FAILURE_KINDS.index(failure["kind"]), failure.get("step") is None

    return sorted(failures, key=place)


def _error_of(failures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The run's problem document. Failures are sorted, causes first; the first one gives the detail."""
    detail = str(failures[0]["detail"]) if failures else "The nodes were stopped; no failure was reported."
    shown = list(failures[:MOST_FAILURES])
    return problem_document(RUN_FAILED, detail, failures=shown, failures_left_out=len(failures) - len(shown))
