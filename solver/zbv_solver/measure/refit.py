"""From traces of ranks to a problem with the costs, and to the jitter, that they measured.

**Costs.** The cost of a stage is the median over all steps, replicas and microbatches, so that a single page
fault or garbage collection has no effect. The latency of a transfer is the time from its producer's end to
its consumer's start, but only if the consumer was already waiting; otherwise the input may have arrived long
before. Costs that were not measured stay as planned. If only some of B, I and W were run, the others keep
their planned proportion to them.

The actions of pairs do not count: a rank has run every F once before its first backward, and runs every
backward once more after its last F, so there are others. Communication keeps its share of every action, and
the factor of pairs is what makes the median pair take as long as measured.

If microbatches differ, every stage is fitted separately, by least squares over the medians of its kinds of
microbatch. Residuals count relative to these medians, so that short microbatches count as much as long ones.
No coefficient is negative, because a feature is an amount of work.

**Jitter.** The duration of an action, divided by the median of its stage and letter, is the product of a
factor of its rank in this step (the median of those quotients) and the action's factor. Latencies of
transfers are divided by the median of their boundary. If microbatches differ, durations and latencies are
first divided by the planned ones of their microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np

from zbv_solver.kernels.jit import FloatArray, IntArray
from zbv_solver.measure.rank_trace import RankTrace, Samples, collect, grouped_medians, latencies
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.cut import CutModel
from zbv_solver.problem.jitter import MAX_FACTOR, NO_SPREAD, Jitter, Spread
from zbv_solver.problem.layer import Layer, LayerCommunication, LayerCosts, Model
from zbv_solver.problem.layered_problem import uncut
from zbv_solver.problem.problem import LETTERS, NANOSECONDS, B, F, I, Problem, W
from zbv_solver.problem.rules import MAX_PAIR_FACTOR
from zbv_solver.problem.stages import Communication, Costs, Placement, pair_duration

Scale = Callable[[float], float]

_DIGITS = 6
"""Significant digits of a measured cost. More would be noise, which would change every plan."""
MOST_SAMPLES = 1000
"""More factors of jitter than this are replaced by as many quantiles."""
_FACTOR_DIGITS = 4
"""Significant digits of a factor."""
_EPSILON = float(np.finfo(np.float64).eps)
_NEGLIGIBLE = 1e-9
"""A coefficient that never adds more than this share of the largest median is a rounding error. Medians below
it count as much as this share."""
_MOST_STEPS = 10
"""Largest number of steps of a fit, times the number of coefficients; rounding could let it cycle."""


def refit(problem: Problem, traces: Sequence[RankTrace], orders: Orders | None = None) -> Problem:
    """The problem with its measured costs; layers are scaled with their stages.

    If the size of the problem's time unit is not known, only the proportions of its costs are known. The unit
    is then chosen so that the measured actions take as long in total as planned.

    Parameters
    ----------
    traces
        Traces of some or all ranks, replicas and steps of a plan of this problem, on one clock.
    orders
        What the ranks ran; needed if they ran pairs, which traces do not name.

    Raises
    ------
    InvalidInput
        When a trace belongs to another problem or to other orders, or no trace has a step.
    """
    samples = collect(problem, traces, orders)
    scale, amounts = nanoseconds_of_unit(problem, samples), regressors(problem)
    parts = [problem.costs, *(feature.costs for feature in problem.features)]
    tables = [np.array([getattr(part, field.name) or () for part in parts]) for field in fields(Costs)]
    forward, inputs, weights, p2p, fused = tables
    planned = [forward, inputs, weights, inputs + weights if problem.costs.backward is None else fused]
    medians = _medians(problem, samples) / scale
    measured = [fitted(amounts, table, medians[letter]) for letter, table in enumerate(planned)]
    has_fused = problem.costs.backward is not None or not np.isnan(measured[B]).all()
    _complete(measured, planned, problem.arrays.count @ amounts)
    waits = fitted(amounts, p2p, _median_latencies(problem, samples) / scale)
    fixed, *coefficients = (
        Costs(
            forward=_rounded(measured[F][row]),
            backward_input=_rounded(measured[I][row]),
            backward_weight=_rounded(measured[W][row]),
            p2p=_rounded(np.where(np.isnan(waits), p2p, waits)[row]),
            backward=_rounded(measured[B][row]) if has_fused else None,
        )
        for row in range(len(parts))
    )
    features = tuple(
        replace(feature, costs=costs, communication=None)
        for feature, costs in zip(problem.features, coefficients, strict=True)
    )
    if features:
        found = replace(problem.without_pairs(), costs=fixed, measured=(), features=features)
        found = _with_communication(found, problem)
    else:
        found = with_stage_costs(problem, fixed)
    return _with_pair_factor(found, samples, scale)


def _with_communication(problem: Problem, planned: Problem) -> Problem:
    """The problem with the planned share of communication in every action; with features the least share."""
    if planned.communication is None:
        return problem
    shares = _ratio(problem.arrays.duration, planned.arrays.duration, 0.0).min(axis=2)

    def scaled(hidden: Communication) -> Communication:
        rows = zip(fields(Communication), shares[[F, I, B]], strict=True)
        return Communication(*(tuple((share * getattr(hidden, each.name)).tolist()) for each, share in rows))

    features = tuple(
        each if before.communication is None else replace(each, communication=scaled(before.communication))
        for each, before in zip(problem.features, planned.features, strict=True)
    )
    return replace(
        problem,
        communication=scaled(planned.communication),
        pair_factor=planned.pair_factor,
        features=features,
    )


def _with_pair_factor(problem: Problem, samples: Samples, scale: float) -> Problem:
    """The problem with the factor that makes the median pair take as long as measured."""
    first = samples.half == 1
    if not first.any():
        return problem
    expected = _planned(replace(problem, pair_factor=1.0), samples)[first] * scale
    factor = float(np.median(_ratio(samples.duration[first], expected)))
    return replace(problem, pair_factor=min(max(1.0, float(f"{factor:.{_DIGITS}g}")), MAX_PAIR_FACTOR))


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
    return float(_ratio(change, before, np.where(change > 0, np.inf, 0.0)).max())


def relative_residual(problem: Problem, traces: Sequence[RankTrace], orders: Orders | None = None) -> float:
    """How far the costs of a problem are from measured ones: |costs - medians| / |medians|.

    The medians are those of every letter, stage and kind of microbatch that was measured. Raises
    :class:`InvalidInput` like :func:`refit`.
    """
    samples = collect(problem, traces, orders)
    medians = _medians(problem, samples) / nanoseconds_of_unit(problem, samples)
    known = np.isfinite(medians)
    difference = (problem.arrays.duration - medians)[known]
    size = float(np.linalg.norm(medians[known]))
    return float(np.linalg.norm(difference)) / size if size > 0 else 0.0


def relative_change(planned: float, measured: float) -> float:
    """Relative change of a number; inf if the planned value is 0 and the measured one is not."""
    if planned == measured:
        return 0.0
    return abs(measured - planned) / planned if planned else math.inf


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


def _medians(problem: Problem, samples: Samples) -> FloatArray:
    """(4, S, K): median duration by letter, stage and kind of microbatch, in ns; nan without measurements."""
    samples, arrays = samples.alone(), problem.arrays
    shape = arrays.duration.shape
    group = (samples.letter * shape[1] + samples.stage) * shape[2] + arrays.kind_of[samples.microbatch]
    return grouped_medians(group, samples.duration, math.prod(shape)).reshape(shape)


def _planned(problem: Problem, samples: Samples) -> FloatArray:
    """(n,): what each action takes by the problem, both of a pair what the pair takes."""
    arrays = problem.arrays
    found = arrays.durations(samples.stage, samples.letter, samples.microbatch)
    first = np.flatnonzero(samples.half == 1)
    if len(first):
        hidden = arrays.hidden(samples.stage, samples.letter, samples.microbatch)
        both = hidden[first], hidden[first + 1]
        found[first] = pair_duration(found[first], found[first + 1], both, problem.pair_factor)
        found[first + 1] = found[first]
    return found


def _median_latencies(problem: Problem, samples: Samples) -> FloatArray:
    """(S - 1, K): median latency by boundary and kind of microbatch, in ns; nan without measurements."""
    boundary, latency, kind = latencies(problem, samples)
    shape = max(problem.n_stages - 1, 0), problem.arrays.kinds
    return grouped_medians(boundary * shape[1] + kind, latency, math.prod(shape)).reshape(shape)


def nanoseconds_of_unit(problem: Problem, samples: Samples) -> float:
    """Nanoseconds per unit of the problem.

    If it is unknown, such that the measured actions took as long as planned.
    """
    known = NANOSECONDS.get(problem.units.time or "")
    if known is not None:
        return known
    is_first = samples.half < 2
    planned, measured = _planned(problem, samples)[is_first].sum(), samples.duration[is_first].sum()
    return float(measured / planned) if planned > 0 and measured > 0 else 1.0


def _ratio(measured: FloatArray, planned: FloatArray, otherwise: FloatArray | float = 1.0) -> FloatArray:
    """measured / planned, or another number where the planned value is 0."""
    out = np.array(np.broadcast_to(otherwise, measured.shape), dtype=np.float64)
    return np.divide(measured, planned, out=out, where=planned > 0)


def _rounded(values: FloatArray) -> tuple[float, ...]:
    return tuple(float(f"{value:.{_DIGITS}g}") for value in values.tolist())


def regressors(problem: Problem) -> FloatArray:
    """The amounts that a cost is a sum of, (K, 1 + f): 1 and the features of every kind of microbatch.

    Features that nothing depends on are 0: they may differ within a kind.
    """
    kind_of = problem.arrays.kind_of
    first = [int(np.argmax(kind_of == kind)) for kind in range(problem.arrays.kinds)]
    columns = [np.ones(len(first))]
    for each in problem.features:
        matters = any(any(values) for values in each.coefficients.values())
        columns.append(np.array(each.value)[first] * matters)
    return np.stack(columns, axis=1)


def fitted(amounts: FloatArray, planned: FloatArray, medians: FloatArray) -> FloatArray:
    """The fixed part and the coefficients (1 + f, n) that medians (n, K) show; nan without measurements.

    Parameters
    ----------
    amounts
        (K, 1 + f), see :func:`regressors`.
    planned
        (1 + f, n). They are scaled where too few kinds were measured to tell the features apart.
    """
    found = np.zeros_like(planned)
    used = amounts.any(axis=0)
    for place, measured in enumerate(medians):
        known = np.isfinite(measured)
        design, target = amounts[known][:, used], measured[known]
        if not len(target):
            found[:, place] = np.nan
            continue
        size = np.abs(design).max(axis=0)
        design = design / np.where(size > 0, size, 1.0)
        if np.linalg.matrix_rank(design) < design.shape[1]:
            found[:, place] = _scaled(planned[:, place], amounts[known], target)
            continue
        weight = 1 / np.maximum(target, _NEGLIGIBLE * target.max() or 1.0)
        fit = non_negative_least_squares(design * weight[:, None], target * weight)
        found[used, place] = np.where(fit > _NEGLIGIBLE * target.max(), fit / size, 0.0)
    return found


def _scaled(planned: FloatArray, amounts: FloatArray, measured: FloatArray) -> FloatArray:
    """Planned coefficients that add up to the measured total; the fixed part alone if none are planned."""
    total = float((amounts @ planned).sum())
    if total > 0:
        scaled: FloatArray = planned * (float(measured.sum()) / total)
        return scaled
    return np.append(measured.mean(), np.zeros(len(planned) - 1))


def non_negative_least_squares(design: FloatArray, target: FloatArray) -> FloatArray:
    """The x >= 0 (k,) with the smallest |design x - target|, for a design (n, k) of full rank.

    The active-set method NNLS of Lawson and Hanson, Solving Least Squares Problems (1974), chapter 23.
    """
    count = design.shape[1]
    x, passive = np.zeros(count), np.zeros(count, dtype=np.bool_)
    tolerance = (
        10 * _EPSILON * float(np.abs(design).sum(axis=0).max()) * float(np.abs(target).max(initial=1.0))
    )
    for _ in range(_MOST_STEPS * count):
        gradient = design.T @ (target - design @ x)
        free = ~passive & (gradient > tolerance)
        if not free.any():
            break
        passive[np.argmax(np.where(free, gradient, -np.inf))] = True
        while passive.any():
            trial = np.zeros(count)
            trial[passive] = np.linalg.lstsq(design[:, passive], target, rcond=None)[0]
            wrong = passive & (trial <= 0)
            if not wrong.any():
                x = trial
                break
            step = float((x[wrong] / (x[wrong] - trial[wrong])).min())
            x = x + step * (trial - x)
            passive &= x > _EPSILON * float(x.max(initial=0.0))
            x[~passive] = 0.0
    return x


def with_stage_costs(problem: Problem, costs: Costs) -> Problem:
    """The problem with other costs of stages and transfers; cut and memory are unchanged.

    ``measured`` is dropped, because it described the program with the former costs.

    The layers of a problem must agree with its stages, so they are scaled: every layer keeps its share of the
    cost of its stage, and its costs when recomputed or on other devices are scaled alike. If all planned
    costs of a stage are 0, its layers share the cost evenly. A stage without layers costs nothing, even if a
    cost was measured. Transfers get the given latencies instead of a link.
    """
    if problem.model is None:
        found = replace(problem.without_pairs(), costs=costs, measured=())
        return _with_communication(found, problem)
    cut, placement = problem.model, problem.placement
    layered = replace(
        uncut(problem),
        model=Model(tuple(_scaled_layers(cut, placement, costs)), cut.model.recompute_modules),
        rules=cut.rules,
        p2p=0.0,
        link=None,
        links=(),
        blocking=False,
        measured=(),
    )
    scaled = layered.cut_into(placement, cut.cut)
    return replace(scaled, costs=replace(scaled.costs, p2p=costs.p2p))


def _scaled_layers(cut: CutModel, placement: Placement, costs: Costs) -> list[Layer]:
    """The scaled layers; every copy becomes a separate layer, because stages scale differently."""
    names, each, found = cut.model.names, cut.model.each, []
    for stage, (begin, end) in enumerate(pairwise(cut.cut.bounds)):
        recomputed = cut.cut.recompute[stage]
        device = cut.devices[placement.rank_of[stage]] if cut.devices else None
        known = [layer.costs_when(recomputed, device) for layer in each[begin:end]]
        scales = (
            _scale([layer.forward for layer in known], costs.forward[stage]),
            _scale([layer.backward_input for layer in known], costs.backward_input[stage]),
            _scale([layer.backward_weight for layer in known], costs.backward_weight[stage]),
            None if costs.backward is None else _scale([it.fused for it in known], costs.backward[stage]),
        )
        found += [_scaled_layer(names[place], each[place], *scales) for place in range(begin, end)]
    return found


def _scale(known: Sequence[float], total: float) -> Scale:
    before = sum(known)
    if before > 0:
        return lambda value: value * total / before
    return lambda value: total / len(known)


def _scaled_layer(
    name: str, layer: Layer, forward: Scale, inputs: Scale, weights: Scale, fused: Scale | None
) -> Layer:
    def of(costs: LayerCosts) -> LayerCosts:
        scaled = LayerCosts(
            forward(costs.forward),
            inputs(costs.backward_input),
            weights(costs.backward_weight),
            None if fused is None else fused(costs.fused),
            costs.memory,
        )
        return replace(scaled, communication=_scaled_communication(costs, scaled))

    return replace(layer.with_costs(of), name=name, repeat=None)


def _scaled_communication(before: LayerCosts, after: LayerCosts) -> LayerCommunication | None:
    """The communication of a layer, with the same share of each action."""
    if before.communication is None:
        return None

    def share(hidden: float, whole: float, scaled: float) -> float:
        return min(hidden * scaled / whole, scaled) if whole > 0 else 0.0

    hidden = before.communication
    return LayerCommunication(
        share(hidden.forward, before.forward, after.forward),
        share(hidden.backward_input, before.backward_input, after.backward_input),
        share(hidden.backward, before.fused, after.fused),
    )


def jitter_of_traces(problem: Problem, traces: Sequence[RankTrace], orders: Orders | None = None) -> Jitter:
    """The jitter that ranks measured; I or B take the factors of the other one if only one of them was run.

    Pairs do not count. Parameters and errors are those of :func:`refit`.
    """
    samples = collect(problem, traces, orders)
    every, samples = samples, samples.alone()
    arrays, took = problem.arrays, samples.duration
    if not problem.is_equal:
        took = _ratio(took, arrays.durations(samples.stage, samples.letter, samples.microbatch), took)
    factor = _relative(samples.letter * problem.n_stages + samples.stage, took)
    rank = samples.run * problem.pp_degree + arrays.rank_of[samples.stage]
    shared = grouped_medians(rank, factor, int(rank.max()) + 1)
    own = factor / np.where(shared[rank] > 0, shared[rank], 1.0)
    actions = [_spread_of(own[samples.letter == letter]) for letter in range(len(LETTERS))]
    for letter, other in ((I, B), (B, I)):
        if actions[letter] is NO_SPREAD:
            actions[letter] = actions[other]
    boundary, latency, kind = latencies(problem, every)
    if not problem.is_equal:
        latency = _ratio(latency, arrays.latency[boundary, kind], latency)
    transfer = _spread_of(_relative(boundary, latency))
    return Jitter(tuple(actions), (_spread_of(shared[np.isfinite(shared)]),), transfer)


def _relative(group: IntArray, values: FloatArray) -> FloatArray:
    """Values divided by the median of their group; 1 where that is 0."""
    if not len(values):
        return values
    return _ratio(values, grouped_medians(group, values, int(group.max()) + 1)[group])


def _spread_of(factors: FloatArray) -> Spread:
    """The distribution of factors; none if there are fewer than two."""
    if len(factors) < 2:
        return NO_SPREAD
    if len(factors) > MOST_SAMPLES:
        factors = np.quantile(factors, (np.arange(MOST_SAMPLES) + 0.5) / MOST_SAMPLES)
    kept = np.sort(np.minimum(factors, MAX_FACTOR)).tolist()
    return Spread(samples=tuple(float(f"{factor:.{_FACTOR_DIGITS}g}") for factor in kept))
