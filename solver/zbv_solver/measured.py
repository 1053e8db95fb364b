"""What a step of a run took, held against its plan: where the time went, rank by rank.

A step of length T, on every rank, is time in actions, time in which the rank stood still because an input was
still made (waiting) or under way (transfer), and time between the end of one action and turning to the next.
The plan says how much of each there was to be, so of each rank

    measured T - planned T = compute + transfer + waiting + between

where each term is measured minus planned, and the sum is exact. Where the objective is the span, T is the
longest time of any rank from its first start to its last end, which is what a span states and needs no common
clock; what a rank is done earlier than that counts as waiting. Where it is the makespan, T is from the first
start of all to the last end of all, and a rank waits before its first action and after its last.

Times are in the plan's unit. Why a step took longer is the business of :mod:`zbv_solver.explain`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zbv_solver.errors import InvalidInput
from zbv_solver.plan import Plan
from zbv_solver.problem import LETTERS, F, W
from zbv_solver.rank_trace import END, START, WAIT, RankTrace
from zbv_solver.refit import NANOSECONDS

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class MeasuredStep:
    """One step of one replica, laid along the flat order of its plan's n actions.

    Attributes
    ----------
    turned, start, end
        (n,) float64: when the rank turned to the action, when its input was there, when it was done. 0 is
        first start of all; nan on ranks that sent nothing.
    ranks
        The ranks of the pipeline that sent the step, ascending.
    uncertainty
        By which times of different ranks may be shifted against each other.
    """

    step: int
    replica: int
    turned: FloatArray
    start: FloatArray
    end: FloatArray
    ranks: tuple[int, ...]
    uncertainty: float
    loss: float | None = None


@dataclass(frozen=True)
class Parts:
    """What a rank's step consists of; see the module."""

    compute: float
    transfer: float
    waiting: float
    between: float

    @property
    def total(self) -> float:
        """The length of the step."""
        return self.compute + self.transfer + self.waiting + self.between

    def without_transfer(self) -> Parts:
        """The same with transfer as a part of waiting: for ranks whose clocks do not agree."""
        return Parts(self.compute, 0.0, self.waiting + self.transfer, self.between)

    def __sub__(self, other: Parts) -> Parts:
        return Parts(
            self.compute - other.compute,
            self.transfer - other.transfer,
            self.waiting - other.waiting,
            self.between - other.between,
        )


@dataclass(frozen=True)
class RankAccount:
    """Where one rank's step went, planned and measured."""

    rank: int
    planned: Parts
    measured: Parts

    @property
    def difference(self) -> Parts:
        """Measured minus planned; its total is the step's."""
        return self.measured - self.planned


@dataclass(frozen=True)
class Account:
    """Where a step went on every rank that sent it; ``planned`` and ``measured`` are its lengths."""

    step: int
    replica: int
    planned: float
    measured: float
    ranks: tuple[RankAccount, ...]

    @property
    def difference(self) -> float:
        """Measured minus planned."""
        return self.measured - self.planned


@dataclass(frozen=True)
class KindTimes:
    """A rank's actions of one letter: mean planned duration, and that of its stages' measured medians."""

    rank: int
    letter: str
    count: int
    planned: float
    measured: float

    @property
    def ratio(self) -> float:
        """Measured over planned; 1 where both are 0."""
        if self.planned > 0:
            return self.measured / self.planned
        return 1.0 if self.measured <= 0 else float("inf")


@dataclass(frozen=True)
class ClockConflict:
    """Inputs that were there before they were made, by more than the clocks are uncertain.

    Attributes
    ----------
    inputs
        Those that came from another rank, of which ``count`` were too early.
    worst
        By how much, in the plan's unit.
    """

    count: int
    inputs: int
    worst: float


def common_steps(traces: Sequence[RankTrace]) -> tuple[int, ...]:
    """The steps that all of these traces have, ascending."""
    return tuple(sorted(frozenset.intersection(*(trace.numbers for trace in traces)))) if traces else ()


def nanoseconds_of_unit(plan: Plan, traces: Sequence[RankTrace]) -> tuple[float, bool]:
    """Nanoseconds in the plan's time unit, and whether the plan says so.

    A unit that says nothing is chosen as :func:`zbv_solver.refit.refit` does: so that the measured actions
    took as long in all as planned.
    """
    named = NANOSECONDS.get(plan.problem.units.time or "")
    if named is not None:
        return named, True
    durations = plan.problem.arrays.duration
    steps = [step for trace in traces for step in trace.steps]
    planned = sum(float(durations[s.orders.letter, s.orders.stage].sum()) for s in steps)
    measured = sum(float((s.times[:, END] - s.times[:, START]).sum()) for s in steps)
    return (measured / planned if planned > 0 and measured > 0 else 1.0), False


def lay_out(plan: Plan, traces: Sequence[RankTrace], step: int, nanoseconds: float) -> MeasuredStep:
    """A step of one replica along its plan.

    Parameters
    ----------
    traces
        Of some or all ranks of one replica, on one clock.
    nanoseconds
        In a unit of the plan.

    Raises
    ------
    InvalidInput
        When no trace has the step, or a rank did not run its list of the plan.
    """
    columns = np.full((3, len(plan.orders)), np.nan)
    chosen = {trace.pp_rank: each for trace in traces for each in trace.steps if each.step == step}
    if not chosen:
        raise InvalidInput.at("/steps", f"found no rank that has step {step}.")
    origin = min(int(each.times[0, START]) for each in chosen.values() if len(each.times))
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


def account(plan: Plan, measured: MeasuredStep) -> Account:
    """Where the step went on every rank that sent it; see the module."""
    from zbv_solver.timing import earliest_times, span_start_times  # numba: only who asks waits for it

    orders, is_span = plan.orders, plan.problem.objective == "span"
    source = sources(plan)
    duration = plan.problem.arrays.duration[orders.letter, orders.stage]
    start = span_start_times(plan.problem, orders) if is_span else earliest_times(plan.problem, orders)[0]
    end = start + duration
    length = step_length(plan, measured)
    rows = []
    for rank in measured.ranks:
        part = orders.slice_of(rank)
        if part.start == part.stop:
            continue
        turned = np.concatenate((start[part][:1] if is_span else [0.0], end[part][:-1]))
        plans = _parts(start[part], end[part], turned, _made(end, source[part]), plan.objective)
        turned = measured.turned[part].copy()
        turned[0] = measured.start[part][0] if is_span else 0.0
        made = _made(measured.end, source[part])
        found = _parts(measured.start[part], measured.end[part], turned, made, length)
        rows.append(RankAccount(rank, plans, found))
    return Account(measured.step, measured.replica, plan.objective, length, tuple(rows))


def step_length(plan: Plan, measured: MeasuredStep) -> float:
    """How long a step took, as the plan's objective measures it."""
    parts = [plan.orders.slice_of(rank) for rank in measured.ranks]
    parts = [part for part in parts if part.start < part.stop]
    first = np.array([measured.start[part][0] for part in parts])
    last = np.array([measured.end[part][-1] for part in parts])
    if plan.problem.objective == "span":
        return float((last - first).max(initial=0.0))
    return float(last.max(initial=0.0) - first.min(initial=0.0))


def typical(plan: Plan, steps: Sequence[MeasuredStep]) -> MeasuredStep:
    """The step of the median length (the shorter of two), so that what is shown did happen."""
    ordered = sorted(steps, key=lambda step: (step_length(plan, step), step.step))
    return ordered[(len(ordered) - 1) // 2]


def kind_times(plan: Plan, steps: Sequence[MeasuredStep]) -> tuple[KindTimes, ...]:
    """Planned and measured durations by rank and letter, over all these steps.

    Per stage the median over its microbatches and the steps counts, and stages by their number of actions.
    """
    orders, durations = plan.orders, plan.problem.arrays.duration
    found = []
    for rank in sorted(set().union(*(step.ranks for step in steps))):
        part = orders.slice_of(rank)
        took = np.array([(step.end - step.start)[part] for step in steps])
        took = took[~np.isnan(took).any(axis=1)]
        for code, letter in enumerate(LETTERS):
            is_one = orders.letter[part] == code
            if not is_one.any():
                continue
            stages, counts = np.unique(orders.stage[part][is_one], return_counts=True)
            medians = [float(np.median(took[:, is_one & (orders.stage[part] == stage)])) for stage in stages]
            found.append(
                KindTimes(
                    rank,
                    letter,
                    int(counts.sum()),
                    float(durations[code, stages] @ counts) / float(counts.sum()),
                    float(np.array(medians) @ counts) / float(counts.sum()),
                )
            )
    return tuple(found)


def clock_conflict(plan: Plan, measured: MeasuredStep) -> ClockConflict:
    """How far the ranks' clocks contradict the order of events: no input is there before it is made."""
    source = sources(plan)
    remote = np.flatnonzero(source >= 0)
    early = measured.end[source[remote]] - measured.start[remote]
    early = early[~np.isnan(early)]
    wrong = early[early > measured.uncertainty]
    return ClockConflict(len(wrong), len(early), float(wrong.max(initial=0.0)))


def sources(plan: Plan) -> IntArray:
    """(n,): the action that makes the input that an action gets from another rank, -1 where there is none."""
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
    if ran != plan.orders.text(rank):
        raise InvalidInput.at(
            "/steps",
            f"rank {rank} ran {len(ran)} actions that are not its list of plan {plan.plan_id[:12]}; take the "
            f"plan that the trace names.",
        )


def _made(end: FloatArray, source: IntArray) -> FloatArray:
    """When the inputs were made; nan where none came from another rank, or nobody knows."""
    return np.where(source >= 0, end[source], np.nan)


def _parts(start: FloatArray, end: FloatArray, turned: FloatArray, made: FloatArray, length: float) -> Parts:
    """A rank's step that begins when it turns to its first action, and is ``length`` long."""
    still = start - turned
    # Of the time since the input was made, as much as the rank stood still for; nan where nothing was sent.
    transfer = float(np.nansum(np.clip(start - made, 0.0, still)))
    slack = turned[0] + length - end[-1]
    return Parts(
        compute=float((end - start).sum()),
        transfer=transfer,
        waiting=float(still.sum()) - transfer + float(slack),
        between=float((turned[1:] - end[:-1]).sum()),
    )
