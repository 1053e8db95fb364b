"""What the step of a planned layout consists of."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.cut import Cut
from zbv_solver.problem.layered_problem import uncut
from zbv_solver.problem.problem import Problem
from zbv_solver.timing.start_times import evaluate

from zbv_models.estimate.layers import LayerEstimate
from zbv_models.estimate.times import TimeShares
from zbv_models.layouts.layer_costs import recomputed
from zbv_models.layouts.search import PlannedLayout

SECONDS = 1e-6
"""In a microsecond."""


@dataclass(frozen=True)
class Composition:
    """Seconds that add up to the step.

    The parts up to ``idle`` are those of the rank that computes longest in the pipeline. The last four are
    those of the rank that needs longest for them.

    Attributes
    ----------
    forward, backward_input, backward_weight
        Compute, without exchanges.
    recomputation
        All that recomputed stages add, with their exchanges.
    tensor_parallel, context_parallel, expert_parallel, data_parallel
        Exchanges in every microbatch that compute does not hide.
    transfers
        How much shorter the step would be in the same order if transfers between ranks took no time.
    idle
        The rank waits even so, for another rank to compute: the bubble.
    gradient_reduction, parameter_gathering, optimizer, table_reduction
        Work once per step; ``table_reduction`` sums the gradients of a shared embedding.
    """

    forward: float
    backward_input: float
    backward_weight: float
    recomputation: float
    tensor_parallel: float
    context_parallel: float
    expert_parallel: float
    data_parallel: float
    transfers: float
    idle: float
    gradient_reduction: float
    parameter_gathering: float
    optimizer: float
    table_reduction: float

    @property
    def total(self) -> float:
        """The step in seconds."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """The parts by name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


def composition(planned: PlannedLayout) -> Composition:
    """Attribute the step of a layout to its parts."""
    plan, estimate = planned.plan, planned.estimated.estimate
    model = plan.problem.model
    if model is None:  # for type checkers: the plan of a layout has layers
        raise TypeError("a plan of layers has no cut; this is a bug in zbv, please report it.")
    problem = _without_transfers(plan.problem, model.cut)
    hosted, repeated = problem.placement.stages_of, planned.recomputed
    rank = max(range(problem.pp_degree), key=problem.busy_time)
    of = _layers_on(planned, rank)
    compute, again, exchanges = np.zeros(3), 0.0, TimeShares()
    for stage in hosted[rank]:
        for name in model.partition[stage]:
            layer = of[name]
            plain, waits = layer.plain.times, layer.exchanged
            compute += _row(plain.forward, plain.backward_input, plain.backward_weight)
            compute -= _row(waits.forward, waits.backward_input, waits.backward_weight)
            exchanges += layer.shares
            if name in repeated:
                again += (
                    recomputed(layer, planned.layout.recompute) or layer.plain
                ).times.total - plain.total
    scale = problem.microbatches * SECONDS
    forward, backward_input, backward_weight = (compute * scale).tolist()
    of_microbatches = {
        "forward": forward,
        "backward_input": backward_input,
        "backward_weight": backward_weight,
        "recomputation": again * scale,
        "tensor_parallel": exchanges.tensor_parallel * scale,
        "context_parallel": exchanges.context_parallel * scale,
        "expert_parallel": exchanges.expert_parallel * scale,
        "data_parallel": exchanges.data_parallel * scale,
    }
    # Fused backwards may be shorter than I and W.
    saved = sum(of_microbatches.values()) - _busy_time(problem, plan.orders, rank) * SECONDS
    backward = of_microbatches["backward_input"] + of_microbatches["backward_weight"]
    for name in ("backward_input", "backward_weight") if backward > 0 else ():
        of_microbatches[name] -= saved * of_microbatches[name] / backward
    waiting = plan.metrics.span * SECONDS - sum(of_microbatches.values())
    transfers = (plan.metrics.span - evaluate(problem, plan.orders).span) * SECONDS
    steps = [
        [own[name].step for s in stages for name in model.partition[s]]
        for stages, own in ((stages, _layers_on(planned, rank)) for rank, stages in enumerate(hosted))
    ]
    busiest = max(steps, key=lambda own: sum(each.total for each in own))
    return Composition(
        **of_microbatches,
        transfers=transfers,
        idle=max(0.0, waiting - transfers),
        gradient_reduction=(sum(each.gradient_reduction for each in busiest) + planned.estimated.latency)
        * SECONDS,
        parameter_gathering=sum(each.parameter_gathering for each in busiest) * SECONDS,
        optimizer=sum(each.optimizer for each in busiest) * SECONDS,
        table_reduction=estimate.table_reduction * SECONDS,
    )


def _layers_on(planned: PlannedLayout, rank: int) -> dict[str, LayerEstimate]:
    """The estimate of every layer on a rank's devices, by name."""
    estimated = planned.estimated
    kind = estimated.kind_of[rank]
    return {name: layers[kind] for layers in estimated.layers for name in layers[kind].names}


def _busy_time(problem: Problem, orders: Orders, rank: int) -> float:
    """How long a rank computes in an order."""
    part = orders.slice_of(rank)
    of = (orders.stage[part], orders.letter[part], orders.microbatch[part])
    return float(problem.arrays.durations(*of).sum())


def _row(*values: float) -> np.ndarray:
    return np.array(values)


def _without_transfers(problem: Problem, cut: Cut) -> Problem:
    """The same problem if every transfer took no time."""
    layers = replace(uncut(problem), p2p=0.0, link=None, links=(), blocking=False, limit=None)
    return layers.cut_into(problem.placement, cut)
