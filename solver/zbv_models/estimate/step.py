"""What a layer costs per step, not per microbatch: gradients, parameters and the optimizer.

Replicas sum gradients with an all-reduce, in which a device sends 2 (d - 1) / d of them. With ZeRO stage 1
they reduce and scatter gradients, and gather updated parameters, each (d - 1) / d (Rajbhandari et al. 2020,
§7). A replica that holds only a share of the gradients between microbatches (stage 2) must reduce those of
every microbatch in W. One that holds only a share of the parameters (stage 3; FSDP, Zhao et al. 2023, §3)
also gathers them in F and again in I.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zbv_models.estimate.amounts import PerAction, Summed
from zbv_models.estimate.device import GIGA, MICROSECONDS, Device, GroupLink, GroupLinks
from zbv_models.estimate.states import HeldBytes, Share

HOST_BANDWIDTH = 38.0
"""GB/s of a device's share of its host's memory, for states that the host updates; assumed: half of 614 GB/s,
16 channels of DDR5-4800, for 8 devices."""


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


def step_times(shares: tuple[Share, ...], zero_stage: int, device: Device, links: GroupLinks) -> StepTimes:
    """What a layer costs per step."""
    reduction = gathering = moved = hosted = 0.0
    for each in shares:
        kept, link = each.kept, _link(each, links)
        steps = each.replicas - 1
        sent, exposed = steps / each.replicas * each.count, 1 - link.overlap
        if zero_stage < 2:
            passes = 1 if zero_stage else 2
            reduction += exposed * link.time(passes * sent * kept.reduced, passes * steps)
        if 0 < zero_stage < 3:
            gathering += exposed * link.time(sent * kept.gathered, steps)
        updated = each.count / (each.replicas if zero_stage else 1)
        moved += updated * kept.updated + kept.of(each.count, each.replicas).gradients
        hosted += updated * kept.hosted
    on_host = hosted * MICROSECONDS / (HOST_BANDWIDTH * GIGA)
    return StepTimes(reduction, gathering, device.streaming(moved) + on_host)


def _link(share: Share, links: GroupLinks) -> GroupLink:
    return links.expert_data if share.is_expert else links.data


def microbatch_times(
    shares: tuple[Share, ...], zero_stage: int, compute: PerAction, links: GroupLinks
) -> PerAction:
    """Time of the replicas' exchanges in each F, I and W; compute hides at most its own duration."""
    if zero_stage < 2:
        return PerAction()

    def exposed(size_of: Callable[[HeldBytes], float], hiding: float) -> float:
        found = 0.0
        for each in shares:
            link, steps = _link(each, links), each.replicas - 1
            time = link.time(steps / each.replicas * each.count * size_of(each.kept), steps)
            found += max(time * (1 - link.overlap), time - hiding)
        return found

    def gathered(kept: HeldBytes) -> float:
        return kept.gathered if zero_stage == 3 else 0.0

    return PerAction(
        exposed(gathered, compute.forward),
        exposed(gathered, compute.backward_input),
        exposed(lambda kept: kept.reduced, compute.backward_weight),
    )


def buffer_bytes(shares: tuple[Share, ...]) -> int:
    """Workspace of a layer while replicas exchange its parameters or gradients."""
    return int(sum(each.count * each.kept.buffers for each in shares if each.replicas > 1))
