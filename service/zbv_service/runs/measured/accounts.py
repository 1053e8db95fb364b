"""Where the time of a measured step went on each rank, compared with the plan.

On every rank, a step of length T consists of time in actions (compute), time in which the rank was idle
because an input was being computed (waiting) or sent (transfer), and time from the end of one action until
the rank turned to the next (between). The plan defines the same parts, so for each rank

    measured T - planned T = compute + transfer + waiting + between

where each term is measured minus planned, and the sum is exact. If the objective is the span, T is the
longest time of any rank from its first start to its last end, which needs no common clock; a rank that takes
less time waits for the rest. If it is the makespan, T is the time from the first start of any rank to the
last end of any rank, and a rank waits before its first action and after its last.

A pair is one action here, which waits for the inputs of both. Times are in the plan's unit.
:mod:`zbv_service.runs.measured.explain` finds out why a step took longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from zbv_solver.measure.rank_trace import END, START, WAIT, with_pairs_whole
from zbv_solver.plans.orders import durations
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import LETTERS

from zbv_service.runs.measured.step import (
    FloatArray,
    IntArray,
    MeasuredStep,
    first_halves,
    halves,
    sources,
    step_length,
)

PAIR = "pair"
"""In the place of a letter: pairs."""


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
    """Or :data:`PAIR`."""
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
    source, first = sources(plan), first_halves(plan)
    start = span_start_times(plan.problem, orders) if is_span else earliest_times(plan.problem, orders)[0]
    start[first] = start[first + 1]  # by itself it could start earlier
    planned = np.stack([start, start, start + durations(plan.problem, orders)], axis=1)
    planned = with_pairs_whole(planned, first)
    ran = with_pairs_whole(np.stack([measured.turned, measured.start, measured.end], axis=1), first)
    length = step_length(plan, measured)
    rows = []
    for rank in measured.ranks:
        part, pairs = orders.slice_of(rank), np.array(orders.pairs(rank), np.int64)
        if part.start == part.stop:
            continue
        begin = planned[part.start, START] if is_span else 0.0
        planned[part, WAIT] = np.concatenate(([begin], planned[part, END][:-1]))
        ran[part.start, WAIT] = ran[part.start, START] if is_span else 0.0
        plans = _parts(planned[part], _made(planned[:, END], source[part]), pairs, plan.objective)
        found = _parts(ran[part], _made(ran[:, END], source[part]), pairs, length)
        rows.append(RankAccount(rank, plans, found))
    return Account(measured.step, measured.replica, plan.objective, length, tuple(rows))


def kind_times(plan: Plan, steps: Sequence[MeasuredStep]) -> tuple[KindTimes, ...]:
    """Planned and measured durations by rank and letter, over all these steps, and those of pairs.

    The measured duration of a stage is the median over microbatches and steps, or if microbatches differ the
    mean of the medians of its actions over steps; stages are weighted by their number of actions. Pairs are
    like microbatches that differ.
    """
    orders, planned = plan.orders, durations(plan.problem, plan.orders)
    is_half, first = halves(plan), first_halves(plan)
    found = []
    for rank in sorted(set().union(*(step.ranks for step in steps))):
        part = orders.slice_of(rank)
        took = np.array([_took(step, first)[part] for step in steps])
        took = took[~np.isnan(took).any(axis=1)]
        is_second = is_half[part].copy()
        is_second[list(orders.pairs(rank))] = False
        chosen = {
            letter: ~is_half[part] & (orders.letter[part] == code) for code, letter in enumerate(LETTERS)
        }
        for letter, is_one in (chosen | {PAIR: is_second}).items():
            if not is_one.any():
                continue
            stages, counts = np.unique(orders.stage[part][is_one], return_counts=True)
            if plan.problem.is_equal and letter != PAIR:
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
                    float(planned[part][is_one].mean()),
                    mean,
                )
            )
    return tuple(found)


def _took(step: MeasuredStep, first: IntArray) -> FloatArray:
    """(n,) how long every action took, both of a pair as long as the pair."""
    whole = with_pairs_whole(np.stack([step.turned, step.start, step.end], axis=1), first)
    took: FloatArray = whole[:, END] - whole[:, START]
    return took


def _made(end: FloatArray, source: IntArray) -> FloatArray:
    """When the inputs were computed; nan if an input is not from another rank, or the time is unknown."""
    return np.where(source >= 0, end[source], np.nan)


def _parts(times: FloatArray, made: FloatArray, pairs: IntArray, length: float) -> Parts:
    """The parts of a rank's step that begins when it turns to its first action, and has this length."""
    # Of a pair, the first action waits for both inputs and takes no time.
    made[pairs] = np.fmax(made[pairs], made[pairs + 1])
    made[pairs + 1] = np.nan
    turned, start, end = times.T.copy()
    end[pairs] = turned[pairs + 1] = start[pairs]
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
