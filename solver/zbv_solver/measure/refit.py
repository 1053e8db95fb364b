"""From traces of ranks to a problem with the costs that they measured.

The cost of a stage is the median over all steps, replicas and microbatches, so that a single page fault or
garbage collection has no effect. The latency of a transfer is the time from its producer's end to its
consumer's start, but only if the consumer was already waiting; otherwise the input may have arrived long
before. Costs that were not measured stay as planned. If only some of B, I and W were run, the others keep
their planned proportion to them.

If microbatches differ, the coefficients of their features are fitted
(:mod:`zbv_solver.measure.coefficients`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from zbv_solver.errors import InvalidInput
from zbv_solver.kernels.arrays import FloatArray, IntArray
from zbv_solver.measure.coefficients import fitted, regressors
from zbv_solver.measure.rank_trace import END, START, WAIT, RankTrace
from zbv_solver.measure.stage_costs import with_stage_costs
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.costs import Costs
from zbv_solver.problem.problem import LETTERS, B, F, I, Problem, W

NANOSECONDS: dict[str, float] = {"ns": 1.0, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9}
"""Nanoseconds in one time unit."""

_DIGITS = 6
"""Significant digits of a measured cost. More would be noise, which would change every plan."""


def refit(problem: Problem, traces: Sequence[RankTrace]) -> Problem:
    """The problem with its measured costs; layers are scaled with their stages.

    If the problem's time unit is not one of :data:`NANOSECONDS`, only the proportions of its costs are known.
    The unit is then chosen so that the measured actions take as long in total as planned.

    Parameters
    ----------
    traces
        Traces of some or all ranks, replicas and steps of a plan of this problem, on one clock.

    Raises
    ------
    InvalidInput
        When a trace belongs to another problem, or no trace has a step.
    """
    samples = collect(problem, traces)
    if problem.features:
        return _refit_features(problem, samples)
    medians = _medians(samples, problem.n_stages)
    scale = _nanoseconds(problem, samples)
    forward, inputs, weights, fused = medians / scale
    costs = problem.costs
    planned = np.array([costs.fused(stage) for stage in range(problem.n_stages)])
    inputs, weights = _halves(costs, inputs, weights, fused, planned)
    measured = Costs(
        forward=_or_planned(forward, costs.forward),
        backward_input=_rounded(inputs),
        backward_weight=_rounded(weights),
        backward=_fused(costs, inputs, weights, fused, planned),
        p2p=_or_planned(_latencies(problem, samples) / scale, costs.p2p),
    )
    return with_stage_costs(problem, measured)


def largest_change(planned: Problem, measured: Problem) -> float:
    """The largest relative change of any stage's F, I, W or B; inf if the planned value is 0."""
    tables = [
        each.arrays.duration
        if planned.is_equal and measured.is_equal
        else each.arrays.duration[..., each.arrays.kind_of]
        for each in (planned, measured)
    ]
    before, after = (table.ravel() for table in tables)
    change = np.abs(after - before)
    return float(np.divide(change, before, out=np.where(change > 0, np.inf, 0.0), where=before > 0).max())


def relative_residual(problem: Problem, traces: Sequence[RankTrace]) -> float:
    """How far the costs of a problem are from measured ones: |costs - medians| / |medians|.

    The medians are those of every letter, stage and kind of microbatch that was measured. Raises
    :class:`InvalidInput` like :func:`refit`.
    """
    samples = collect(problem, traces)
    medians = _kind_medians(problem, samples) / _nanoseconds(problem, samples)
    known = np.isfinite(medians)
    difference = (problem.arrays.duration - medians)[known]
    size = float(np.linalg.norm(medians[known]))
    return float(np.linalg.norm(difference)) / size if size > 0 else 0.0


def relative_change(planned: float, measured: float) -> float:
    """Relative change of a number; inf if the planned value is 0 and the measured one is not."""
    if planned == measured:
        return 0.0
    return abs(measured - planned) / planned if planned else math.inf


@dataclass(frozen=True, eq=False)
class Samples:
    """The n actions of all traces; ``run`` numbers the pairs of replica and step. Times are in ns."""

    run: IntArray
    stage: IntArray
    letter: IntArray
    microbatch: IntArray
    times: IntArray

    @property
    def duration(self) -> FloatArray:
        """(n,) in nanoseconds."""
        return (self.times[:, END] - self.times[:, START]).astype(np.float64)


def collect(problem: Problem, traces: Sequence[RankTrace]) -> Samples:
    """The actions of all traces; raises :class:`InvalidInput` like :func:`refit`."""
    runs: dict[tuple[int, int], int] = {}
    parts: list[tuple[IntArray, ...]] = []
    for trace in traces:
        for step in trace.steps:
            orders = step.orders
            _require_of(problem, trace, orders)
            run = np.full(len(orders), runs.setdefault((trace.replica, step.step), len(runs)))
            parts.append((run, orders.stage, orders.letter, orders.microbatch, step.times))
    if not any(len(times) for *_, times in parts):
        raise InvalidInput.at("/steps", "found no measured action; let the ranks finish a step first.")
    return Samples(*(np.concatenate(column).astype(np.int64) for column in zip(*parts, strict=True)))


def _require_of(problem: Problem, trace: RankTrace, orders: Orders) -> None:
    p, m = problem.pp_degree, problem.microbatches
    if trace.pp_rank >= p:
        raise InvalidInput.at("/pp_rank", f"found {trace.pp_rank}; the problem has ranks 0 to {p - 1}.")
    hosted = np.array(problem.placement.stages_of[trace.pp_rank])
    for name, found, allowed in (
        ("stage", orders.stage, hosted),
        ("microbatch", orders.microbatch, np.arange(m)),
    ):
        wrong = np.setdiff1d(found, allowed)
        if len(wrong):
            raise InvalidInput.at(
                "/steps",
                f"rank {trace.rank} ran {name} {wrong[0]}, which does not belong to rank {trace.pp_rank} of "
                f"the pipeline; use traces of a plan of this problem.",
            )


def _refit_features(problem: Problem, samples: Samples) -> Problem:
    """:func:`refit` of a problem with features: the fixed part and every coefficient, by stage."""
    scale, amounts = _nanoseconds(problem, samples), regressors(problem)
    parts = [problem.costs, *(each.costs for each in problem.features)]
    tables = [np.array([getattr(part, field.name) or () for part in parts]) for field in fields(Costs)]
    forward, inputs, weights, p2p, fused = tables
    planned = [forward, inputs, weights, inputs + weights if problem.costs.backward is None else fused]
    medians = _kind_medians(problem, samples) / scale
    found = [fitted(amounts, table, medians[letter]) for letter, table in enumerate(planned)]
    has_fused = problem.costs.backward is not None or not np.isnan(found[B]).all()
    _complete(found, planned, problem.arrays.count @ amounts)
    boundary, latency, kind = latencies(problem, samples)
    shape = (max(problem.n_stages - 1, 0), problem.arrays.kinds)
    waits = grouped_medians(boundary * shape[1] + kind, latency, math.prod(shape)).reshape(shape)
    measured_p2p = fitted(amounts, p2p, waits / scale)
    fixed, *coefficients = (
        Costs(
            forward=_rounded(found[F][row]),
            backward_input=_rounded(found[I][row]),
            backward_weight=_rounded(found[W][row]),
            p2p=_rounded(np.where(np.isnan(measured_p2p), p2p, measured_p2p)[row]),
            backward=_rounded(found[B][row]) if has_fused else None,
        )
        for row in range(len(parts))
    )
    features = (
        replace(each, costs=costs) for each, costs in zip(problem.features, coefficients, strict=True)
    )
    return replace(problem, costs=fixed, measured=(), features=tuple(features))


def _complete(found: list[FloatArray], planned: list[FloatArray], amounts: FloatArray) -> None:
    """Fill in what was not measured, by letter: in proportion to what was, else as planned.

    ``amounts`` (1 + f,) are those of all microbatches together.
    """

    def in_proportion(letters: tuple[int, ...], to: FloatArray, before: FloatArray) -> None:
        whole = amounts @ before
        for letter in letters:
            scaled = planned[letter] * _ratio(amounts @ to, whole)
            supposed = np.where(whole > 0, scaled, to / len(letters))
            found[letter] = np.where(np.isnan(found[letter]), supposed, found[letter])

    in_proportion((I, W), found[B], planned[B])
    for letter in (F, I, W):
        found[letter] = np.where(np.isnan(found[letter]), planned[letter], found[letter])
    in_proportion((B,), found[I] + found[W], planned[I] + planned[W])


def _kind_medians(problem: Problem, samples: Samples) -> FloatArray:
    """(4, S, K): median duration by letter, stage and kind of microbatch, in ns; nan without measurements."""
    shape = problem.arrays.duration.shape
    kind = problem.arrays.kind_of[samples.microbatch]
    group = (samples.letter * shape[1] + samples.stage) * shape[2] + kind
    return grouped_medians(group, samples.duration, math.prod(shape)).reshape(shape)


def _medians(samples: Samples, n_stages: int) -> FloatArray:
    """(4, S): median duration by letter and stage, in nanoseconds; nan without measurements."""
    return grouped_medians(
        samples.letter * n_stages + samples.stage, samples.duration, len(LETTERS) * n_stages
    ).reshape(len(LETTERS), n_stages)


def grouped_medians(group: IntArray, values: FloatArray, groups: int) -> FloatArray:
    """The median of every group of values; nan for an empty group."""
    by_group = np.argsort(group, kind="stable")
    begins = np.searchsorted(group[by_group], np.arange(groups + 1))
    found = np.full(groups, np.nan)
    for index in np.flatnonzero(np.diff(begins)):
        found[index] = np.median(values[by_group[begins[index] : begins[index + 1]]])
    return found


def _nanoseconds(problem: Problem, samples: Samples) -> float:
    """Nanoseconds per unit of the problem."""
    return NANOSECONDS.get(problem.units.time or "") or _fitted_unit(problem, samples)


def _fitted_unit(problem: Problem, samples: Samples) -> float:
    """Nanoseconds per unit of the problem, such that the measured actions took as long as planned."""
    planned = problem.arrays.durations(samples.stage, samples.letter, samples.microbatch).sum()
    measured = samples.duration.sum()
    return float(measured / planned) if planned > 0 and measured > 0 else 1.0


def _halves(
    costs: Costs,
    inputs: FloatArray,
    weights: FloatArray,
    fused: FloatArray,
    planned: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """I and W per stage: measured, else in proportion to a measured B, else as planned."""
    ratio = _ratio(fused, planned)
    found = []
    for measured, before in ((inputs, costs.backward_input), (weights, costs.backward_weight)):
        whole = np.where(planned > 0, np.array(before) * ratio, fused / 2)
        supposed = np.where(np.isnan(fused), before, whole)
        found.append(np.where(np.isnan(measured), supposed, measured))
    return found[0], found[1]


def _fused(
    costs: Costs,
    inputs: FloatArray,
    weights: FloatArray,
    fused: FloatArray,
    planned: FloatArray,
) -> tuple[float, ...] | None:
    """B per stage: measured, else in proportion to I and W; None if B is I + W as far as known."""
    if costs.backward is None and np.isnan(fused).all():
        return None
    before = np.array(costs.backward_input) + np.array(costs.backward_weight)
    supposed = np.where(before > 0, planned * _ratio(inputs + weights, before), inputs + weights)
    return _rounded(np.where(np.isnan(fused), supposed, fused))


def _ratio(measured: FloatArray, planned: FloatArray) -> FloatArray:
    """measured / planned; 1 where the planned value is 0."""
    return np.divide(measured, planned, out=np.ones_like(measured), where=planned > 0)


def _latencies(problem: Problem, samples: Samples) -> FloatArray:
    """(S-1,): median latency of every boundary in ns, over both directions; nan without measurements."""
    boundary, latency, _ = latencies(problem, samples)
    return grouped_medians(boundary, latency, max(problem.n_stages - 1, 0))


def latencies(problem: Problem, samples: Samples) -> tuple[IntArray, FloatArray, IntArray]:
    """Boundary, latency in ns and kind of microbatch of every transfer that its receiver waited for; (k,)."""
    n_stages, m = problem.n_stages, problem.microbatches
    down = samples.letter == F
    shape = (int(samples.run.max()) + 1, 2, n_stages, m)
    done = np.full(shape, np.iinfo(np.int64).min)
    makes = samples.letter != W
    at = (samples.run, down.astype(np.int64), samples.stage, samples.microbatch)
    done[tuple(index[makes] for index in at)] = samples.times[makes, END]
    source = samples.stage + np.where(down, -1, 1)
    boundary = np.minimum(samples.stage, source)
    is_remote = np.zeros(n_stages + 1, dtype=bool)  # by boundary; the last entry serves -1
    is_remote[: n_stages - 1] = [not problem.placement.is_local(b) for b in range(n_stages - 1)]
    taken = makes & (source >= 0) & (source < n_stages) & is_remote[boundary]
    sent = done[samples.run[taken], at[1][taken], source[taken], samples.microbatch[taken]]
    times = samples.times[taken]
    waited_for = (sent > np.iinfo(np.int64).min) & (times[:, WAIT] < sent)
    latency = np.maximum(times[waited_for, START] - sent[waited_for], 0).astype(np.float64)
    kind = problem.arrays.kind_of[samples.microbatch[taken][waited_for]]
    return boundary[taken][waited_for], latency, kind


def _or_planned(measured: FloatArray, planned: tuple[float, ...]) -> tuple[float, ...]:
    return _rounded(np.where(np.isnan(measured), planned, measured))


def _rounded(values: FloatArray) -> tuple[float, ...]:
    return tuple(float(f"{value:.{_DIGITS}g}") for value in values.tolist())
