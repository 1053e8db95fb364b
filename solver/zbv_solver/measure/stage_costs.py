"""Replace the costs of stages, and scale the layers that they come from.

Costs of a running model are measured per stage. The layers of a problem must agree with its stages, so they
are scaled to the measured costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from zbv_solver.problem.costs import Costs
from zbv_solver.problem.cut import CutModel
from zbv_solver.problem.layer import Layer, LayerCosts, Model
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.placement import Placement
from zbv_solver.problem.problem import Problem

_Scale = Callable[[float], float]


def with_stage_costs(problem: Problem, costs: Costs) -> Problem:
    """The problem with other costs of stages and transfers; cut and memory are unchanged.

    ``measured`` is dropped, because it described the program with the former costs.

    Every layer keeps its share of the cost of its stage, and its costs when recomputed or on other devices
    are scaled alike. If all
    planned costs of a stage are 0, its layers share the cost evenly. A stage without layers costs nothing,
    even if a cost was measured. Transfers get the given latencies instead of a link.
    """
    if problem.model is None:
        return replace(problem, costs=costs, measured=())
    cut, placement = problem.model, problem.placement
    layered = LayeredProblem(
        model=Model(tuple(_scaled_layers(cut, placement, costs)), cut.model.recompute_modules),
        pp_degree=problem.pp_degree,
        microbatches=problem.microbatches,
        static=cut.static,
        limit=problem.memory.limit,
        placement=placement.kind,
        chunks=placement.chunks if placement.kind == "loop" else None,
        objective=problem.objective,
        rules=cut.rules,
        units=problem.units,
        devices=cut.devices,
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

    return replace(layer.with_costs(of), name=name, repeat=None)
