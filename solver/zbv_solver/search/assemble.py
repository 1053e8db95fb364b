"""Verified plans of known orders, the classical schedules as baselines, and the unit of time of a search.

A problem by stages keeps its stages in a classical schedule. For a problem by layers, every schedule gets the
best cut that a search finds for its own order, with the plan's memory limit and its freedom to recompute
stages.

A search compares sums of times. In floating point, 0.1 + 0.2 is not 0.3, so two sums may be equal in
milliseconds and differ in seconds, and the plan would depend on the caller's unit. Costs with a common
divisor are therefore converted to integers, so that their sums are exact. Other costs become fractions of
the largest cost, with :data:`~zbv_solver.problem.numeric.SIGNIFICANT_BITS` binary digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np

from zbv_solver import bounds
from zbv_solver.construct.baselines import (
    OFFLOADED,
    baseline,
    baseline_names,
    order_of,
    placements_of,
    require_baseline,
    without_limit,
)
from zbv_solver.errors import InvalidInput, InvalidPlan
from zbv_solver.kernels.jit import FloatArray
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import Baseline, CutCertificate, Metrics, Plan, Provenance, certify
from zbv_solver.problem.cut import Cut, Link
from zbv_solver.problem.layer import Layer, LayerCommunication, LayerCosts, Model
from zbv_solver.problem.layered_problem import LayeredProblem, uncut
from zbv_solver.problem.numeric import MIN_NUMBER, SEARCH_MEMORY, exceeds, integer_scale, rounded_to_bits
from zbv_solver.problem.problem import B, F, I, Problem, W, objective_value, require_same_problem
from zbv_solver.problem.stages import Communication
from zbv_solver.search.incumbent import Progress
from zbv_solver.timing.start_times import earliest_times, evaluate
from zbv_solver.verify.verifier import verify_metrics, verify_orders

CACHED = 64
"""Cuts that are kept: a plan's page shows the schedules several times."""


def make_plan(
    problem: Problem,
    orders: Orders,
    *,
    method: str,
    lower_bound: float | None = None,
    source: str = "bounds",
    seed: int = 0,
    seconds: float = 0.0,
    extra: dict[str, Any] | None = None,
) -> Plan:
    """A verified plan from orders, without baselines.

    Parameters
    ----------
    lower_bound, source
        A proven bound on the objective, and where it comes from; None computes one.

    Raises
    ------
    InvalidPlan
        When the orders break a rule of the problem.
    ContradictedBound
        When the orders undercut the bound.
    """
    verified = verify_orders(problem, orders)
    timing = evaluate(problem, orders)
    bound = bounds.lower_bound(problem).value if lower_bound is None else lower_bound
    value = objective_value(problem.objective, timing)
    certificate = certify(problem, value, bound, source)
    metrics = Metrics(
        makespan=timing.makespan,
        span=timing.span,
        bubble_rate=timing.bubble_rate,
        peak_memory=timing.peak_memory,
        lower_bound=certificate.lower_bound,
        gap=certificate.gap,
        status=certificate.status,
    )
    plan = Plan(problem, orders, metrics, (), Provenance(method, seed, seconds, extra=extra or {}))
    verify_metrics(plan, verified)
    return plan


def classical(name: str, problem: Problem) -> tuple[Problem, Orders]:
    """The problem of a baseline, cut for its order if it has layers, and the order, with its pairs or copies.

    Raises
    ------
    InvalidInput
        For a name that the problem's baselines do not have.
    """
    if name in OFFLOADED:
        return _with_copies(OFFLOADED[name], *baseline(name, problem))
    if problem.model is None or not problem.is_equal:
        return _with_pairs(*baseline(name, problem))
    require_baseline(name, problem)
    return _recut(name, problem)


def _with_pairs(problem: Problem, orders: Orders) -> tuple[Problem, Orders]:
    """An order with pairs where it is shorter with them, if the problem has pairs."""
    if problem.communication is None:
        return problem, orders
    from zbv_solver.construct.pairs import joined  # few problems need it

    return problem, joined(problem, orders)


def _with_copies(share: float, problem: Problem, orders: Orders) -> tuple[Problem, Orders]:
    """An order in which a share of every rank's stages is copied, those of the first chunks.

    An activation stays if its backward follows sooner than it could leave and return.
    """
    from zbv_solver.improve.copied_order import Lists  # loads kernels that few problems need

    unlimited, copies = without_limit(problem), problem.copies
    if copies is None:
        return problem, orders
    start, end = earliest_times(unlimited.without_copies(), orders)
    away = np.zeros((problem.n_stages, problem.microbatches))
    for letters, time in (((F,), -end), ((I, B), start)):
        mine = np.isin(orders.letter, letters)
        away[orders.stage[mine], orders.microbatch[mine]] += time[mine]
    moves = np.zeros(away.shape, np.bool_)
    for own in problem.placement.stages_of:
        moves[list(own[: int(share * len(own))])] = True
    moves &= away > (np.array(copies.offload) + np.array(copies.reload))[:, None]
    lists = Lists.of(unlimited, orders)
    lists.copied[:] = moves.ravel()
    return problem, lists.orders(unlimited, orders)


@lru_cache(maxsize=CACHED)
def _recut(name: str, problem: Problem) -> tuple[Problem, Orders]:
    from zbv_solver.partition.descent import cut_for_order  # loads kernels that only layers need

    cuts = []
    for placement in placements_of(name, problem):
        orders = order_of(name, placement, problem.microbatches)
        layers = OwnUnit.of(uncut(problem, placement))
        own, given = _own_cut(problem, placement.n_stages), layers.given
        # Cuts are searched for single actions: as they are, and as if pairs hid all communication.
        for costs in dict.fromkeys((layers.problem, layers.problem.with_communication_hidden())):
            cut = cut_for_order(costs, orders, own)
            cuts.append(_with_pairs(given.cut_into(placement, cut), orders))
    if len(cuts) == 1:
        return cuts[0]

    def rank(made: tuple[Problem, Orders]) -> tuple[bool, float]:
        timing = evaluate(without_limit(made[0]), made[1])
        return not fits(made[0], timing.peak_memory), objective_value(problem.objective, timing)

    return min(cuts, key=rank)


def stated(row: Baseline, problem: Problem) -> tuple[Problem, Orders]:
    """A baseline with the cut that it states, or as :func:`classical` if it states none.

    Raises
    ------
    InvalidPlan
        When its cut is not one of the problem's layers.
    """
    if problem.model is None or row.layers_per_stage is None:
        return classical(row.name, problem)
    bounds, layers = (0, *accumulate(row.layers_per_stage)), problem.model.model.n_layers
    stages = len(bounds) - 1
    recompute = row.recompute or (False,) * stages
    for placement in placements_of(row.name, problem):
        if placement.n_stages == stages == len(recompute) and bounds[-1] == layers:
            orders = order_of(row.name, placement, problem.microbatches)
            placed = uncut(problem, placement).cut_into(placement, Cut.at(bounds, recompute))
            if row.name in OFFLOADED:
                return _with_copies(OFFLOADED[row.name], placed, orders)
            return _with_pairs(placed, orders)
    raise InvalidPlan(
        f"the stated cut of baseline {row.name} has {stages} stages with {bounds[-1]} layers, which the "
        f"schedule cannot have; the problem has {layers} layers on {problem.pp_degree} ranks."
    )


def _own_cut(problem: Problem, n_stages: int) -> list[Cut]:
    """The cut of the problem, with neighbouring stages merged, if that gives the number of stages."""
    if problem.model is None or problem.n_stages % n_stages:
        return []
    merged = problem.model.merged(problem.n_stages // n_stages)
    return [] if merged is None else [merged.cut]


def compare(problem: Problem) -> tuple[Baseline, ...]:
    """What the classical schedules achieve on a problem; every plan has them as ``plan.baselines``.

    They are GPipe, 1F1B, eager and interleaved 1F1B, ZB-H1, and those of a V: ZB-V, V-half, V-min and
    DualPipeV. If microbatches differ, also in the order used in practice (``-practice``), and DynaPipe's
    schedule. Only that one, and the cuts of layers, know the memory limit; :attr:`Baseline.fits` says which
    schedules keep it.
    """
    return tuple(baseline_row(name, *classical(name, problem)) for name in baseline_names(problem))


def baseline_row(name: str, problem: Problem, orders: Orders) -> Baseline:
    """A schedule of a problem as a baseline, with its cut if the problem has layers."""
    unlimited = without_limit(problem)
    verify_orders(unlimited, orders)
    timing = evaluate(unlimited, orders)
    model = problem.model
    return Baseline(
        name,
        timing.span,
        timing.makespan,
        timing.bubble_rate,
        timing.peak_memory,
        fits(problem, timing.peak_memory),
        None if model is None else tuple(len(stage) for stage in model.partition),
        None if model is None or not model.model.can_recompute else model.cut.recompute,
    )


def baseline_plan(name: str, problem: Problem) -> Plan:
    """A classical schedule of the same model as a verified plan, on the placement of that schedule.

    If the schedule exceeds the memory limit, the plan's problem has no limit, so that it can still be shown
    and run.
    """
    own_problem, orders = classical(name, problem)
    unlimited = without_limit(own_problem)
    peaks = evaluate(unlimited, orders).peak_memory
    return make_plan(own_problem if fits(own_problem, peaks) else unlimited, orders, method=name)


def fits(problem: Problem, peaks: tuple[float, ...]) -> bool:
    """Whether peaks of memory keep the limit of a problem."""
    limits = problem.memory.limit
    return limits is None or not any(
        exceeds(p, limit, SEARCH_MEMORY) for p, limit in zip(peaks, limits, strict=True)
    )


LARGEST_COST = 1 << 32
"""Sums of a million integer costs up to this are exact."""


@dataclass(frozen=True)
class SearchUnit:
    """The unit of time of a search."""

    length: float
    """Its length in the caller's unit."""
    scale: float | None
    """The factor that makes all costs integers; None if they have no common divisor."""

    @classmethod
    def of(cls, times: Sequence[float]) -> SearchUnit:
        """The unit for a problem; ``times`` are all times that its search adds up."""
        scale = integer_scale(times, LARGEST_COST)
        return cls(max(times), None) if scale is None else cls(1 / scale, scale)

    def converted(self, times: Sequence[float]) -> tuple[float, ...]:
        """Convert times from the caller's unit to this one; times below the smallest number become 0."""
        return tuple(self.table(np.array(times, dtype=np.float64)).tolist())

    def table(self, times: FloatArray) -> FloatArray:
        """Like :meth:`converted`, for an array of any shape."""
        found = rounded_to_bits(times / self.length) if self.scale is None else np.rint(times * self.scale)
        return np.where(found < MIN_NUMBER, 0.0, found)


def in_search_unit(problem: Problem) -> tuple[Problem, float]:
    """The problem in the unit of its search, without layers, and the length of that unit in the caller's.

    Multiply a time of the returned problem by the length to get the caller's time, up to rounding.
    """
    if problem.features and problem.is_equal:
        problem = problem.averaged()
    arrays, costs, hidden = problem.arrays, problem.costs, problem.communication
    times = [arrays.duration, arrays.latency]
    if arrays.communication is not None:
        times.append(arrays.communication)
    unit = SearchUnit.of([time for table in times for time in table.ravel().tolist()])
    if not problem.is_equal:
        # Every sum for a microbatch is converted, not the coefficients, so that sums are exact as below.
        duration = unit.table(arrays.duration)
        if costs.backward is None:
            duration[B] = duration[I] + duration[W]
        communication = None if arrays.communication is None else unit.table(arrays.communication)
        latency = unit.table(arrays.latency)
        converted = replace(arrays, duration=duration, latency=latency, communication=communication)
        return problem.with_arrays(converted), unit.length
    own = costs.mapped(unit.converted, unit.converted(arrays.latency[:, 0].tolist()))
    if hidden is not None:
        hidden = Communication(*map(unit.converted, vars(hidden).values()))
    return replace(problem, costs=own, communication=hidden, model=None), unit.length


@dataclass(frozen=True, eq=False)
class OwnUnit:
    """A layered problem in the caller's unit and in the unit of its search."""

    given: LayeredProblem
    problem: LayeredProblem
    """In the caller's unit, and in the unit of the search."""
    length: float
    """Length of the search's unit in the caller's unit."""

    @classmethod
    def of(cls, given: LayeredProblem) -> OwnUnit:
        """Convert all costs; memory is unchanged."""
        link, layers = given.link, given.model.layers
        transfers = [given.p2p]
        for each in given.links or (() if link is None else (link,)):
            transfers += [each.latency, *(each.transfer(layer.output_bytes) for layer in layers)]
        times = [time for layer in layers for _, costs in layer.costs_by_pointer() for time in _times(costs)]
        unit = SearchUnit.of([*times, *transfers])
        latency = 0.0 if link is None else unit.converted([link.latency])[0]

        def of_time(link: Link) -> Link:
            return Link(unit.converted([link.latency])[0], link.bandwidth * unit.length)

        def converted(layer: Layer) -> Layer:
            found = layer.with_costs(lambda costs: _converted(costs, unit))
            if link is None:
                return found
            # Transfers take latency + bytes / bandwidth: with bandwidth 1, bytes are a time.
            transfer = unit.converted([link.transfer(layer.output_bytes)])[0]
            return replace(found, output_bytes=max(0.0, transfer - latency))

        problem = replace(
            given,
            model=Model(tuple(map(converted, layers)), given.model.recompute_modules),
            p2p=unit.converted([given.p2p])[0] if link is None else 0.0,
            link=None if link is None else Link(latency, 1.0),
            links=tuple(map(of_time, given.links)),
            host=None if given.host is None else of_time(given.host),
        )
        return cls(given, problem, unit.length)

    def incumbent(self, plan: Plan) -> Plan:
        """A caller's plan as a verified plan in the unit of the search; raises :class:`InvalidPlan`."""
        try:
            cut = self.given.as_cut_in(plan.problem)
        except InvalidInput as error:
            raise InvalidPlan(f"the incumbent is not a plan of these layers: {error}") from None
        require_same_problem(cut, plan.problem)
        converted = make_plan(_same_cut(self.problem, cut), plan.orders, method=plan.provenance.method)
        return replace(converted, provenance=plan.provenance)

    def progress(self, progress: Progress) -> Progress:
        """Progress of the search in the caller's unit."""
        return replace(
            progress,
            objective=progress.objective * self.length,
            lower_bound=progress.lower_bound * self.length,
            problem=_same_cut(self.given, progress.problem),
        )

    def plan(self, found: Plan) -> Plan:
        """A plan of the search in the caller's unit; raises :class:`ContradictedBound`."""
        plan = make_plan(
            _same_cut(self.given, found.problem),
            found.orders,
            method=found.provenance.method,
            lower_bound=found.metrics.lower_bound * self.length,
        )
        cut = found.cut
        if cut is not None:
            proven = certify(self.given, plan.objective, cut.lower_bound * self.length, "cuts")
            cut = CutCertificate(cut.method, proven.lower_bound, proven.gap)
        baselines = tuple(
            replace(row, span=row.span * self.length, makespan=row.makespan * self.length)
            for row in found.baselines
        )
        return replace(plan, baselines=baselines, provenance=found.provenance, cut=cut)


def _same_cut(problem: LayeredProblem, other: Problem) -> Problem:
    if other.model is None:
        raise TypeError("the problem was not given by layers.")
    return problem.cut_into(other.placement, other.model.cut)


def _times(costs: LayerCosts) -> list[float]:
    hidden = costs.hidden
    own = [costs.forward, costs.backward_input, costs.backward_weight, costs.fused]
    return [*own, hidden.forward, hidden.backward_input, hidden.backward]


def _converted(costs: LayerCosts, unit: SearchUnit) -> LayerCosts:
    forward, inputs, weights, fused, *hidden = unit.converted(_times(costs))
    communication = None if costs.communication is None else LayerCommunication(*hidden)
    backward = None if costs.backward is None else fused
    return LayerCosts(forward, inputs, weights, backward, costs.memory, communication)
