"""Why a step took longer or shorter than planned: the effect of each possible cause on its own.

A rank that waits is seldom the cause, because it waits for another rank. So the plan's order is replayed with
one thing as measured and everything else as planned: the actions of one letter on one rank, of a rank, of a
letter, all actions, pairs, the transfers, the time between actions, or ranks that start as early as possible
although the span assumes staggered starts. The effect of a cause is how much longer its replay takes.
Effects need not add up: one cause can hide another, and variation between microbatches that are planned alike
is part of none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from zbv_solver.export.quantities import percent
from zbv_solver.measure.rank_trace import grouped_medians
from zbv_solver.plans.orders import durations
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import LETTERS, F, Problem

from zbv_service.runs.measured.accounts import Account
from zbv_service.runs.measured.step import FloatArray, MeasuredStep, first_halves, halves, sources

CauseKind = Literal["actions", "pairs", "transfers", "between", "start"]

REPLAYED = 12
"""Ranks, and pairs of rank and letter, that are replayed: those with the largest difference in time."""
CONVINCING = 0.6
"""A cause must explain this share of the difference to be preferred over more general ones."""
COMMON = 0.8
"""A finding about one rank is widened to all ranks if all deviate by at least this share of it."""
NEGLIGIBLE = 0.01
"""A step took as long as planned if it differs by at most this share."""


@dataclass(frozen=True)
class Cause:
    """Something that differs from the plan."""

    kind: CauseKind
    rank: int | None
    letter: str | None
    """The rank and the letter of the actions; None for all."""
    ratio: float | None
    """Measured over planned time; None if no time is planned."""
    effect: float
    """How much longer the step takes if nothing else differs from the plan, in the plan's unit."""


@dataclass(frozen=True)
class Explanation:
    """The main cause, None if the step took as long as planned, and all replayed causes."""

    planned: float
    measured: float
    main: Cause | None
    causes: tuple[Cause, ...]

    @property
    def difference(self) -> float:
        """Measured minus planned."""
        return self.measured - self.planned

    def share(self, cause: Cause) -> float:
        """The share of the difference that a cause explains on its own."""
        return cause.effect / self.difference if self.difference else 0.0


def explain(plan: Plan, measured: MeasuredStep, account: Account) -> Explanation:
    """The causes of the difference between a step and its plan."""
    found = tuple(sorted(_causes(plan, measured, account), key=lambda cause: -abs(cause.effect)))
    return Explanation(account.planned, account.measured, _main(found, account), found)


def sentence(explanation: Explanation) -> str:
    """The finding in words."""
    planned, difference, main = explanation.planned, explanation.difference, explanation.main
    change = difference / planned if planned > 0 else 0.0
    if main is None:
        return f"The step took as long as planned ({_signed(change)})."
    direction = "longer" if difference > 0 else "less"
    head = f"The step took {percent(abs(change), 1)} {direction} than planned."
    share = explanation.share(main)
    if share < CONVINCING / 2:
        return f"{head} No single cause explains it; the largest: {_lower(told(main))}."
    extent = "all" if 0.95 <= share <= 1.05 else percent(share, 0)
    more = "" if share <= 1.05 else "; other causes made up for a part of it"
    return f"{head} {told(main)}: that alone explains {extent} of the difference{more}."


def told(cause: Cause) -> str:
    """A cause in words, without its effect."""
    if cause.kind == "start":
        return "Ranks started as early as possible and then waited; the span assumes staggered starts"
    if cause.kind == "between":
        return "Ranks spent time between actions, although none was planned"
    times = "" if cause.ratio is None else f"{cause.ratio:.2f} ×"
    if cause.kind in ("transfers", "pairs"):
        return f"{cause.kind.capitalize()} took {times} what was planned"
    if cause.rank is None:
        return f"{cause.letter or 'Actions of every kind'} took {times} what was planned, over all ranks"
    return f"Rank {cause.rank}'s {cause.letter or 'actions'} took {times} what was planned"


def _lower(text: str) -> str:
    return text[0].lower() + text[1:] if text.startswith(("Rank", "Transfers", "Actions", "Pairs")) else text


def _signed(share: float) -> str:
    return percent(share, 1) if share <= 0 else f"+{percent(share, 1)}"


def _main(causes: tuple[Cause, ...], account: Account) -> Cause | None:
    """The most specific cause that explains most of the difference, else the one that explains most."""
    difference = account.difference
    if abs(difference) <= NEGLIGIBLE * account.planned or not causes:
        return None
    helpful = [cause for cause in causes if cause.effect * difference > 0]
    for specific in (2, 1, 0):
        for cause in helpful:
            if _specific(cause) >= specific and cause.effect / difference >= CONVINCING:
                return _widened(cause, helpful)
    return helpful[0] if helpful else causes[0]


def _widened(cause: Cause, causes: list[Cause]) -> Cause:
    """The same cause for all ranks or letters, if the others deviate by about as much."""
    wider = [
        each
        for each in causes
        if each.kind == cause.kind
        and _specific(each) == _specific(cause) - 1
        and each.rank in (None, cause.rank)
        and each.letter in (None, cause.letter)
    ]
    for each in wider:
        if _off(each) * _off(cause) > 0 and abs(_off(each)) >= COMMON * abs(_off(cause)):
            return _widened(each, causes)
    return cause


def _off(cause: Cause) -> float:
    """The relative deviation of a cause's time from the planned time."""
    return 0.0 if cause.ratio is None else cause.ratio - 1


def _specific(cause: Cause) -> int:
    if cause.kind != "actions":
        return 2  # these cannot be narrowed down
    return (cause.rank is not None) + (cause.letter is not None)


def _causes(plan: Plan, measured: MeasuredStep, account: Account) -> Iterator[Cause]:
    from zbv_solver.timing.start_times import earliest_start_values, objective_of  # loads numba

    planned = plan.problem.arrays.duration
    base = objective_of(plan.problem, plan.orders)
    if plan.problem.objective == "span":
        yield Cause("start", None, None, None, earliest_start_values(plan.problem, plan.orders)[1] - base)
    counts, took = _durations(plan, measured)
    for rank, letter in _groups(plan, measured, (counts * (took - planned)).sum(axis=2)):
        chosen = _chosen(plan.problem, rank, letter)[..., None]
        changed = np.where(chosen, took, planned)
        time = float((counts * planned * chosen).sum())
        ratio = float((counts * took * chosen).sum()) / time if time > 0 else None
        effect = objective_of(_with_durations(plan.problem, changed), plan.orders) - base
        yield Cause("actions", rank, None if letter is None else LETTERS[letter], ratio, effect)
    first = first_halves(plan)
    known = first[np.isfinite(measured.end[first])]
    if len(known):
        ended = np.maximum(measured.end[known], measured.end[known + 1])
        began = np.minimum(measured.start[known], measured.start[known + 1])
        time = float(durations(plan.problem, plan.orders)[known + 1].sum())
        ratio = float((ended - began).sum()) / time if time > 0 else 1.0
        factor = plan.problem.pair_factor * ratio
        slowed = replace(plan.problem, given_arrays=plan.problem.arrays, pair_factor=factor)
        yield Cause("pairs", None, None, ratio, objective_of(slowed, plan.orders) - base)
    yield from _transfers(plan, measured, base)
    held_up = np.zeros(plan.problem.n_stages)
    for row in account.ranks:
        part = plan.orders.slice_of(row.rank)
        stages = list(plan.problem.placement.stages_of[row.rank])
        held_up[stages] = max(row.measured.between, 0.0) / (part.stop - part.start)
    if held_up.any():
        effect = objective_of(_with_durations(plan.problem, planned + held_up[:, None]), plan.orders) - base
        yield Cause("between", None, None, None, effect)


def _groups(
    plan: Plan, measured: MeasuredStep, change: FloatArray
) -> Iterator[tuple[int | None, int | None]]:
    """The ranks and letters to replay as measured, None for all; ``change`` (4, S) is in total time."""
    letters = [code for code in range(len(LETTERS)) if change[code].any()]
    stages_of = plan.problem.placement.stages_of
    of_rank = {
        (rank, code): float(change[code, list(stages_of[rank])].sum())
        for rank in measured.ranks
        for code in letters
    }
    yield from sorted(of_rank, key=lambda group: -abs(of_rank[group]))[:REPLAYED]
    if len(letters) > 1:
        whole = {rank: abs(sum(of_rank[rank, code] for code in letters)) for rank in measured.ranks}
        yield from ((rank, None) for rank in sorted(whole, key=lambda rank: -whole[rank])[:REPLAYED])
        yield None, None
    yield from ((None, code) for code in letters)


def _transfers(plan: Plan, measured: MeasuredStep, base: float) -> Iterator[Cause]:
    """All transfers as measured: by boundary and kind of microbatch, the median that a rank waited for."""
    from zbv_solver.timing.start_times import objective_of  # loads numba

    source = sources(plan)
    at = np.flatnonzero(source >= 0)
    sent, turned = measured.end[source[at]], measured.turned[at]
    # A pair waits for two inputs, so its transfers do not count.
    waited = np.isfinite(sent) & np.isfinite(turned) & (turned <= sent) & ~halves(plan)[at]
    at, sent = at[waited], sent[waited]
    if not len(at):
        return
    stage = plan.orders.stage[at]
    boundary = np.where(plan.orders.letter[at] == F, stage - 1, stage)
    took = np.maximum(measured.start[at] - sent, 0.0)
    arrays = plan.problem.arrays
    pair = boundary * arrays.kinds + arrays.kind_of[plan.orders.microbatch[at]]
    medians = grouped_medians(pair, took, arrays.latency.size).reshape(arrays.latency.shape)
    seen = np.isfinite(medians)
    changed = np.where(seen, medians, arrays.latency)
    planned = float(arrays.latency[seen].sum())
    problem = replace(plan.problem, given_arrays=replace(arrays, latency=changed))
    ratio = float(changed[seen].sum()) / planned if planned > 0 else None
    yield Cause("transfers", None, None, ratio, objective_of(problem, plan.orders) - base)


def _durations(plan: Plan, measured: MeasuredStep) -> tuple[FloatArray, FloatArray]:
    """(4, S, K) each: number of actions, and mean measured duration, as planned if nothing was measured.

    Only actions that ran alone count, not those of pairs.
    """
    orders, arrays = plan.orders, plan.problem.arrays
    planned = arrays.duration
    row = orders.letter.astype(np.int64) * plan.problem.n_stages + orders.stage
    row = row * arrays.kinds + arrays.kind_of[orders.microbatch]
    shape, size = planned.shape, planned.size
    took = measured.end - measured.start
    known = np.isfinite(took) & ~halves(plan)
    sums, count = np.bincount(row[known], took[known], size), np.bincount(row[known], minlength=size)
    means = np.divide(sums, count, out=planned.ravel().copy(), where=count > 0)
    return np.bincount(row, minlength=size).astype(np.float64).reshape(shape), means.reshape(shape)


def _chosen(problem: Problem, rank: int | None, letter: int | None) -> NDArray[np.bool_]:
    """(4, S): whether an action has this rank and letter; None matches all."""
    chosen = np.ones((len(LETTERS), problem.n_stages), dtype=bool)
    if rank is not None:
        chosen &= problem.arrays.rank_of == rank
    if letter is not None:
        chosen &= (np.arange(len(LETTERS)) == letter)[:, None]
    return chosen


def _with_durations(problem: Problem, duration: FloatArray) -> Problem:
    """The problem with these durations (4, S, K)."""
    return replace(problem, given_arrays=replace(problem.arrays, duration=duration))
