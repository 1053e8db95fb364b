"""Where the time of a measured step went on each rank, compared with the plan.

On every rank, a step of length T consists of time in actions (compute), time in which the rank was idle
because an input was being computed (waiting) or sent (transfer), and time from the end of one action until
the rank turned to the next (between). The plan defines the same parts, so for each rank

    measured T - planned T = compute + transfer + waiting + between

where each term is measured minus planned, and the sum is exact. If the objective is the span, T is the
longest time of any rank from its first start to its last end, which needs no common clock; a rank that takes
less time waits for the rest. If it is the makespan, T is the time from the first start of any rank to the
last end of any rank, and a rank waits before its first action and after its last.

Times are in the plan's unit. :mod:`zbv_service.runs.measured.explain` finds out why a step took longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import LETTERS

from zbv_service.runs.measured.step import FloatArray, IntArray, MeasuredStep, sources, step_length


@dataclass(frozen=True)
class Parts:
    """The parts of a rank's step; see the module."""

    compute: float
    transfer: float
    waiting: float
    between: float

    @property
    def total(self) -> float:
        """The length of the step."""
        return self.compute + self.transfer + self.waiting + self.between

    def without_transfer(self) -> Parts:
        """The same with transfer counted as waiting, for ranks with contradicting clocks."""
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
    """The parts of one rank's step, planned and measured."""

    rank: int
    planned: Parts
    measured: Parts

    @property
    def difference(self) -> Parts:
        """Measured minus planned; the total is the difference of the step."""
        return self.measured - self.planned


@dataclass(frozen=True)
class Account:
    """A step on every rank that sent it; ``planned`` and ``measured`` are the lengths of the step."""

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
    """A rank's actions of one letter: mean planned duration, and mean of the stages' measured medians."""

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


def account(plan: Plan, measured: MeasuredStep) -> Account:
    """The parts of the step on every rank that sent it; see the module."""
    from zbv_solver.timing.start_times import earliest_times, span_start_times  # loads numba

    orders, is_span = plan.orders, plan.problem.objective == "span"
    source = sources(plan)
    duration = plan.problem.arrays.durations(orders.stage, orders.letter, orders.microbatch)
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


def kind_times(plan: Plan, steps: Sequence[MeasuredStep]) -> tuple[KindTimes, ...]:
    """Planned and measured durations by rank and letter, over all these steps.

    The measured duration of a stage is the median over microbatches and steps, or if microbatches differ the
    mean of the medians of its actions over steps; stages are weighted by their number of actions.
    """
    orders, durations = (
        plan.orders,
        plan.problem.arrays.durations(plan.orders.stage, plan.orders.letter, plan.orders.microbatch),
    )
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
            if plan.problem.is_equal:
                medians = [
                    float(np.median(took[:, is_one & (orders.stage[part] == stage)])) for stage in stages
                ]
                mean = float(np.array(medians) @ counts) / float(counts.sum())
            else:
                mean = float(np.median(took[:, is_one], axis=0).mean())
            found.append(
                KindTimes(
                    rank,
                    letter,
                    int(counts.sum()),
                    float(durations[part][is_one].mean()),
                    mean,
                )
            )
    return tuple(found)


def _made(end: FloatArray, source: IntArray) -> FloatArray:
    """When the inputs were computed; nan if an input is not from another rank, or the time is unknown."""
    return np.where(source >= 0, end[source], np.nan)


def _parts(start: FloatArray, end: FloatArray, turned: FloatArray, made: FloatArray, length: float) -> Parts:
    """The parts of a rank's step that begins when it turns to its first action, and has this length."""
    idle = start - turned
    # Transfer is the time since the input was computed, as far as the rank was idle; nan if nothing was sent.
    transfer = float(np.nansum(np.clip(start - made, 0.0, idle)))
    slack = turned[0] + length - end[-1]
    return Parts(
        compute=float((end - start).sum()),
        transfer=transfer,
        waiting=float(idle.sum()) - transfer + float(slack),
        between=float((turned[1:] - end[:-1]).sum()),
    )
