"""Stages whose parameters, gradients and optimizer state are spread over the replicas, by PyTorch's FSDP2.

A stage's parameters are gathered when a step begins and stay whole until the stage's last action; then its
gradients are added up, each replica keeps its part, and the whole parameters are freed. Gathering for every
microbatch anew would cost m times the traffic. So a step holds the parameters of its stages, and between
steps each replica has its part of parameters, gradients and optimizer state, as in ZeRO-2 (Rajbhandari et al.
2020, §5). PyTorch's own pipelining runtime does the same with UNSHARD, REDUCE_GRAD and RESHARD.

FSDP2 divides by the number of replicas itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from zbv_worker.errors import InvalidRun
from zbv_worker.execution.main_gradients import is_half
from zbv_worker.training.gradients import Gradients, squares


class ShardedGradients(Gradients):
    """Several replicas, each with a part of every parameter of its stages.

    Parameters
    ----------
    modules
        By stage; they are sharded in place. Their Linear layers must be prepared for deferred weight
        gradients before (:class:`zbv_worker.execution.stage.Stage` does), because FSDP2 changes classes too.

    Raises
    ------
    InvalidRun
        When stages share a parameter.
    """

    def __init__(self, modules: Mapping[int, nn.Module], group: dist.ProcessGroup, device: torch.device):
        mesh = DeviceMesh.from_group(group, device.type)
        shared = {id(p) for module in modules.values() for p in module.parameters()}
        if len(shared) < sum(len(list(module.parameters())) for module in modules.values()):
            raise InvalidRun(
                "found a parameter that two stages share; stages are sharded one by one. Run without "
                "sharding, or do not tie them."
            )
        if any(is_half(p) and p.requires_grad for module in modules.values() for p in module.parameters()):
            raise InvalidRun(
                "--shard: found parameters in half precision; their gradients would be added up in half "
                "precision over the microbatches. Build the model in float32 and give --precision bfloat16, "
                "or leave out --shard."
            )
        self._modules: dict[int, FSDPModule] = {}
        for stage, module in modules.items():
            # Frozen stages, and those without parameters, have nothing to shard.
            if any(parameter.requires_grad for parameter in module.parameters()):
                self._modules[stage] = fully_shard(module, mesh=mesh, reshard_after_forward=False)
        super().__init__(modules)

    def begin(self) -> None:
        """Gather every stage's parameters; until its last action, nothing is summed and nothing freed."""
        for parameter in self.stages_of:
            parameter.grad = None
        for module in self._modules.values():
            # Otherwise done by the module's first forward, but a stage that is recomputed calls its layers'.
            module._get_fsdp_state()._lazy_init()
            _set_last(module, is_last=False)
            module.unshard()

    def stage_done(self, stage: int) -> None:
        """Add up the stage's gradients and free its whole parameters."""
        module = self._modules.get(stage)
        if module is None:
            return
        _set_last(module, is_last=True)
        # FSDP2 does this in a hook of the backward pass, which comes too early: W is still to follow.
        state = module._get_fsdp_state()
        for each in state._state_ctx.all_states:
            for group in each._fsdp_param_groups:
                group.post_backward()
        state._root_post_backward_final_callback()

    def finish(self, timeout: float) -> None:
        """FSDP2 has waited for the sums itself."""

    def square_sum(self) -> Tensor:
        """Every replica answers for the parts that it holds."""
        return squares(_local(gradient) for gradient in self._present())


def _set_last(module: FSDPModule, *, is_last: bool) -> None:
    module.set_is_last_backward(is_last)
    module.set_requires_gradient_sync(is_last)
    module.set_reshard_after_backward(is_last)


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
