"""Layered problems in the unit of the search (:mod:`zbv_solver.search.search_unit`), and plans back again."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zbv_solver.plans.certificate import certify
from zbv_solver.plans.plan import CutCertificate, Plan
from zbv_solver.problem.cut import Link
from zbv_solver.problem.layer import Layer, LayerCosts, Model
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.problem import Problem
from zbv_solver.search.assemble import make_plan
from zbv_solver.search.search_state import Progress
from zbv_solver.search.search_unit import SearchUnit


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

    def given_cut(self, problem: Problem) -> Problem:
        """The problem of a cut in the caller's unit."""
        return _same_cut(self.given, problem)

    def progress(self, heard: Progress) -> Progress:
        """Progress of the search in the caller's unit."""
        return replace(
            heard,
            objective=heard.objective * self.length,
            lower_bound=heard.lower_bound * self.length,
            problem=self.given_cut(heard.problem),
        )

    def incumbent(self, plan: Plan) -> Plan:
        """A plan in the caller's unit, converted to the unit of the search."""
        own = make_plan(_same_cut(self.problem, plan.problem), plan.orders, method=plan.provenance.method)
        baselines = tuple(
            replace(row, span=row.span / self.length, makespan=row.makespan / self.length)
            for row in plan.baselines
        )
        return replace(own, baselines=baselines, provenance=plan.provenance)

    def plan(self, found: Plan) -> Plan:
        """A plan in the unit of the search, converted to the caller's; raises :class:`ContradictedBound`."""
        plan = make_plan(
            self.given_cut(found.problem),
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
