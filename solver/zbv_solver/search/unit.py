"""The unit of time in which a search computes.

A search compares sums of times. In floating point, 0.1 + 0.2 is not 0.3, so two sums may be equal in
milliseconds and differ in seconds, and the plan would depend on the caller's unit. Costs with a common
divisor are therefore converted to integers, so that their sums are exact. Other costs become fractions of
the largest cost, with :data:`~zbv_solver.problem.numeric.SIGNIFICANT_BITS` binary digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from zbv_solver.errors import InvalidInput, InvalidPlan
from zbv_solver.kernels.arrays import FloatArray
from zbv_solver.plans.plan import CutCertificate, Plan, certify
from zbv_solver.problem.cut import Link
from zbv_solver.problem.layer import Layer, LayerCosts, Model
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.numeric import MIN_NUMBER, integer_scale, rounded_to_bits
from zbv_solver.problem.problem import B, I, Problem, W, require_same_problem
from zbv_solver.search.assemble import make_plan
from zbv_solver.search.incumbent import Progress

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
    arrays, costs = problem.arrays, problem.costs
    unit = SearchUnit.of([*arrays.duration.ravel().tolist(), *arrays.latency.ravel().tolist()])
    if not problem.is_equal:
        # Every sum for a microbatch is converted, not the coefficients, so that sums are exact as below.
        duration = unit.table(arrays.duration)
        if costs.backward is None:
            duration[B] = duration[I] + duration[W]
        converted = replace(arrays, duration=duration, latency=unit.table(arrays.latency))
        return problem.with_arrays(converted), unit.length
    own = costs.mapped(unit.converted, unit.converted(arrays.latency[:, 0].tolist()))
    return replace(problem, costs=own, model=None), unit.length


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
        times = [time for layer in layers for costs in layer.every_costs for time in _times(costs)]
        unit = SearchUnit.of([*times, *transfers])
        latency = 0.0 if link is None else unit.converted([link.latency])[0]

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
            links=tuple(
                Link(unit.converted([each.latency])[0], each.bandwidth * unit.length) for each in given.links
            ),
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
    return [costs.forward, costs.backward_input, costs.backward_weight, costs.fused]


def _converted(costs: LayerCosts, unit: SearchUnit) -> LayerCosts:
    forward, inputs, weights, fused = unit.converted(_times(costs))
    return LayerCosts(forward, inputs, weights, None if costs.backward is None else fused, costs.memory)
