"""Layers whose stages turned out to cost something else: scaled, so that they say the same as the stages.

What is measured of a running model is measured per stage. A problem whose layers contradicted its stages
would be none, and one without its layers would no longer say what a stage is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from zbv_solver.problem.cut import CutModel
from zbv_solver.problem.layer import Layer, LayerCosts, Model
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.problem import Costs, Problem

_Scale = Callable[[float], float]


def with_stage_costs(problem: Problem, costs: Costs) -> Problem:
    """A problem with other costs of its stages and transfers; cut and memory stay.

    Of a stage that is made of layers, each keeps its share of what the stage costs, and its alternative is
    scaled alike; where the layers were thought to cost nothing they share evenly. A stage without layers
    costs nothing, whatever was measured of it. Transfers are as given, and follow from no link any more.
    """
    if problem.model is None:
        return replace(problem, costs=costs)
    cut, placement = problem.model, problem.placement
    layered = LayeredProblem(
        model=Model(tuple(_scaled_layers(cut, costs))),
        pp_degree=problem.pp_degree,
        microbatches=problem.microbatches,
        static=cut.static,
        limit=problem.memory.limit,
        placement=placement.kind,
        chunks=placement.chunks if placement.kind == "loop" else None,
        objective=problem.objective,
        rules=cut.rules,
        units=problem.units,
    )
    scaled = layered.cut_into(placement, cut.cut)
    return replace(scaled, costs=replace(scaled.costs, p2p=costs.p2p))


def _scaled_layers(cut: CutModel, costs: Costs) -> list[Layer]:
    """Every copy as a layer of its own, as copies of different stages differ now."""
    names, each, found = cut.model.names, cut.model.each, []
    for stage, (begin, end) in enumerate(pairwise(cut.cut.bounds)):
        recomputed = cut.cut.recompute[stage]
        known = [layer.costs_when(recomputed) for layer in each[begin:end]]
        scales = (
            _scale([layer.forward for layer in known], costs.forward[stage]),
            _scale([layer.backward_input for layer in known], costs.backward_input[stage]),
            _scale([layer.backward_weight for layer in known], costs.backward_weight[stage]),
            None if costs.backward is None else _scale([it.fused for it in known], costs.backward[stage]),
        )
        found += [_scaled(names[place], each[place], *scales) for place in range(begin, end)]
    return found


def _scale(known: Sequence[float], total: float) -> _Scale:
    before = sum(known)
    if before > 0:
        return lambda value: value * total / before
    return lambda value: total / len(known)


def _scaled(
    name: str, layer: Layer, forward: _Scale, inputs: _Scale, weights: _Scale, fused: _Scale | None
) -> Layer:
    def of(costs: LayerCosts) -> LayerCosts:
        return LayerCosts(
            forward(costs.forward),
            inputs(costs.backward_input),
            weights(costs.backward_weight),
            None if fused is None else fused(costs.fused),
            costs.memory,
        )

    alternative = None if layer.recompute is None else of(layer.recompute)
    return replace(layer, name=name, costs=of(layer.costs), recompute=alternative, repeat=None)
