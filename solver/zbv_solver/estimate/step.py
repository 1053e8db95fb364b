"""What a layer costs per step, not per microbatch: gradients, parameters and the optimizer.

Replicas sum gradients with an all-reduce, in which a device sends 2 (d - 1) / d of them. With ZeRO stage 1
they reduce and scatter gradients, and gather updated parameters, each (d - 1) / d (Rajbhandari et al. 2020,
§7). A replica that holds only a share of the gradients between microbatches (stage 2) must reduce those of
every microbatch in W. One that holds only a share of the parameters (stage 3; FSDP, Zhao et al. 2023, §3)
also gathers them in F and again in I.
"""

from __future__ import annotations

from dataclasses import dataclass

from zbv_solver.estimate.amounts import PerAction, Summed
from zbv_solver.estimate.device import Device, GroupLink, GroupLinks
from zbv_solver.estimate.parameters import Parameters, StateBytes
from zbv_solver.estimate.shapes import Degrees


@dataclass(frozen=True)
class StepTimes(Summed):
    """Microseconds per step of one layer on one device.

    Attributes
    ----------
    gradient_reduction, parameter_gathering
        What the replicas exchange once per step and compute does not hide.
    optimizer
        Memory traffic of the norm of gradients, of the update, and of setting gradients to zero.
    """

    gradient_reduction: float = 0.0
    parameter_gathering: float = 0.0
    optimizer: float = 0.0

    @property
    def total(self) -> float:
        """The sum of all kinds."""
        return self.gradient_reduction + self.parameter_gathering + self.optimizer


@dataclass(frozen=True)
class Replicated:
    """Parameters of a layer that have the same replicas.

    Attributes
    ----------
    count
        Number on a device before replicas share them.
    """

    count: int
    replicas: int
    link: GroupLink


def replicated(parameters: Parameters, degrees: Degrees, links: GroupLinks) -> tuple[Replicated, ...]:
    """The parameters of a layer by their replicas: experts have others than the rest."""
    found = [Replicated(parameters.dense_on(degrees), degrees.replicas, links.data)]
    if parameters.experts:
        of_experts = parameters.experts_on(degrees)
        found.append(Replicated(of_experts, degrees.expert_replicas, links.expert_data))
    return tuple(found)


def step_times(
    groups: tuple[Replicated, ...], state: StateBytes, zero_stage: int, device: Device
) -> StepTimes:
    """What a layer costs per step."""
    reduction = gathering = moved = 0.0
    for each in groups:
        steps = each.replicas - 1
        sent, exposed = steps / each.replicas * each.count, 1 - each.link.overlap
        if zero_stage < 2:
            passes = 1 if zero_stage else 2
            reduction += exposed * each.link.time(passes * sent * state.gradients, passes * steps)
        if 0 < zero_stage < 3:
            gathering += exposed * each.link.time(sent * state.parameters, steps)
        updated = each.count / (each.replicas if zero_stage else 1)
        held = each.count / (each.replicas if zero_stage >= 2 else 1)
        moved += updated * update_bytes(state) + held * state.gradients
    return StepTimes(reduction, gathering, device.streaming(moved))


def update_bytes(state: StateBytes) -> float:
    """Memory traffic of an update per parameter.

    Gradients are read for their norm and for the update (Pascanu et al. 2013, §3.2; Kingma and Ba 2015,
    algorithm 1); states and the master copy are read and written, and parameters are written.
    """
    if state.master:
        return 2 * state.gradients + 2 * state.optimizer + state.parameters
    return 2 * state.gradients + 2 * state.optimizer + 2 * state.parameters


def microbatch_times(
    groups: tuple[Replicated, ...], state: StateBytes, zero_stage: int, compute: PerAction
) -> PerAction:
    """Time of the replicas' exchanges in each F, I and W; compute hides at most its own duration."""
    if zero_stage < 2:
        return PerAction()

    def exposed(size: float, hiding: float) -> float:
        found = 0.0
        for each in groups:
            steps = each.replicas - 1
            time = each.link.time(steps / each.replicas * each.count * size, steps)
            found += max(time * (1 - each.link.overlap), time - hiding)
        return found

    gathered = state.parameters if zero_stage == 3 else 0.0
    return PerAction(
        exposed(gathered, compute.forward),
        exposed(gathered, compute.backward_input),
        exposed(state.gradients, compute.backward_weight),
    )


def gathered_bytes(groups: tuple[Replicated, ...], state: StateBytes, zero_stage: int) -> int:
    """Workspace of a layer while an action has its parameters gathered, or its gradients not yet reduced."""
    shared = sum(each.count for each in groups if each.replicas > 1)
    return int(shared * max(state.parameters * (zero_stage == 3), state.gradients * (zero_stage >= 2)))
