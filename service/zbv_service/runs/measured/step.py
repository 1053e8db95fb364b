"""A measured step of a run in the order of its plan: when each action ran, and how long the step took.

Times are in the plan's unit. :mod:`zbv_service.runs.measured.accounts` says where the time went.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from zbv_solver.errors import InvalidInput
from zbv_solver.measure import refit
from zbv_solver.measure.rank_trace import END, START, WAIT, RankTrace, collect
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import NANOSECONDS, F, W

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class MeasuredStep:
    """One step of one replica, in the flat order of its plan's n actions."""

    step: int
    replica: int
    turned: FloatArray
    start: FloatArray
    end: FloatArray
    """(n,) float64: when the rank began to wait for the action's input, had it, and finished the action. 0
    is the earliest start of any rank; nan for ranks that sent nothing."""
    ranks: tuple[int, ...]
    """The pipeline ranks that sent the step, ascending."""
    uncertainty: float
    """The largest error when times of different ranks are compared."""
    loss: float | None = None


@dataclass(frozen=True)
class ClockConflict:
    """Inputs that arrived before they were computed, by more than the uncertainty of the clocks."""

    count: int
    inputs: int
    """Number of inputs from other ranks; ``count`` of them arrived too early."""
    worst: float
    """The largest contradiction, in the plan's unit."""


def nanoseconds_of_unit(plan: Plan, traces: Sequence[RankTrace]) -> tuple[float, bool]:
    """Nanoseconds in the plan's time unit, and whether the plan names that unit.

    For any other unit, the total time of the measured actions is equated with the planned one, as in
    :func:`zbv_solver.measure.refit.refit`. Raises :class:`InvalidInput` like that function.
    """
    is_named = (plan.problem.units.time or "") in NANOSECONDS
    samples = collect(plan.problem, traces, plan.orders)
    return refit.nanoseconds_of_unit(plan.problem, samples), is_named


def lay_out(plan: Plan, traces: Sequence[RankTrace], step: int, nanoseconds: float) -> MeasuredStep:
    """A step of one replica in the order of its plan.

    Parameters
    ----------
    traces
        Traces of some or all ranks of one replica, on one clock.
    nanoseconds
        Nanoseconds in the plan's time unit.

    Raises
    ------
    InvalidInput
        No trace has the step, or a rank did not run its actions of the plan.
    """
    columns = np.full((3, len(plan.orders)), np.nan)
    chosen = {trace.pp_rank: each for trace in traces for each in trace.steps if each.step == step}
    if not chosen:
        raise InvalidInput.at("/steps", f"found no rank that has step {step}.")
    origin = min((int(each.times[0, START]) for each in chosen.values() if len(each.times)), default=0)
    for rank, each in chosen.items():
        _require_list(plan, rank, each.orders.all_text()[0])
        columns[:, plan.orders.slice_of(rank)] = (each.times.T - origin) / nanoseconds
    losses = [each.loss for each in chosen.values() if each.loss is not None]
    return MeasuredStep(
        step=step,
        replica=traces[0].replica,
        turned=columns[WAIT],
        start=columns[START],
        end=columns[END],
        ranks=tuple(sorted(chosen)),
        uncertainty=max(trace.uncertainty for trace in traces) / nanoseconds,
        loss=losses[0] if losses else None,
    )


def step_length(plan: Plan, measured: MeasuredStep) -> float:
    """The length of a step as the plan's objective defines it."""
    parts = [plan.orders.slice_of(rank) for rank in measured.ranks]
    parts = [part for part in parts if part.start < part.stop]
    first = np.array([measured.start[part][0] for part in parts])
    last = np.array([measured.end[part][-1] for part in parts])
    if plan.problem.objective == "span":
        return float((last - first).max(initial=0.0))
    return float(last.max(initial=0.0) - first.min(initial=0.0))


def typical(plan: Plan, steps: Sequence[MeasuredStep]) -> MeasuredStep:
    """The step of median length, the shorter of two middle ones, so that it is a step that really ran."""
    ordered = sorted(steps, key=lambda step: (step_length(plan, step), step.step))
    return ordered[(len(ordered) - 1) // 2]


def clock_conflict(plan: Plan, measured: MeasuredStep) -> ClockConflict:
    """How far the clocks of the ranks contradict causality: no input arrives before it is computed."""
    source = sources(plan)
    remote = np.flatnonzero(source >= 0)
    early = measured.end[source[remote]] - measured.start[remote]
    early = early[~np.isnan(early)]
    wrong = early[early > measured.uncertainty]
    return ClockConflict(len(wrong), len(early), float(wrong.max(initial=0.0)))


def halves(plan: Plan) -> NDArray[np.bool_]:
    """(n,): whether an action is one of the two of a pair."""
    found = np.zeros(len(plan.orders), np.bool_)
    first = first_halves(plan)
    found[first] = found[first + 1] = True
    return found


def first_halves(plan: Plan) -> IntArray:
    """The indices of the F's that run as a pair with the action after them."""
    paired = plan.orders.paired
    return np.zeros(0, np.int64) if paired is None else np.flatnonzero(paired)


def sources(plan: Plan) -> IntArray:
    """(n,): for each action the index of the action on another rank that computes its input, -1 if none."""
    problem, orders = plan.problem, plan.orders
    n_stages, stage = problem.n_stages, orders.stage.astype(np.int64)
    down, makes = orders.letter == F, orders.letter != W
    made_at = np.full((2, n_stages, problem.microbatches), -1, dtype=np.int64)
    made_at[down[makes].astype(np.int64), stage[makes], orders.microbatch[makes]] = np.flatnonzero(makes)
    before = stage + np.where(down, -1, 1)
    has_one = makes & (before >= 0) & (before < n_stages)
    rank_of = problem.arrays.rank_of
    near = np.where(has_one, before, stage)
    has_one &= rank_of[near] != rank_of[stage]
    found = np.full(len(orders), -1, dtype=np.int64)
    found[has_one] = made_at[down[has_one].astype(np.int64), before[has_one], orders.microbatch[has_one]]
    return found


def _require_list(plan: Plan, rank: int, ran: list[str]) -> None:
    p = plan.problem.pp_degree
    if rank >= p:
        raise InvalidInput.at("/pp_rank", f"found {rank}; the plan has ranks 0 to {p - 1}.")
    if ran != plan.orders.without_pairs().without_copies().text(rank):  # traces have single actions
        raise InvalidInput.at(
            "/steps",
            f"rank {rank} ran {len(ran)} actions that are not its list of plan {plan.plan_id[:12]}; use "
            f"the plan that the trace names.",
        )
