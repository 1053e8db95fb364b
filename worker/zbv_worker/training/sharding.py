"""Stages whose parameters, gradients and optimizer state are divided among the replicas, by PyTorch's FSDP2.

A stage's parameters are gathered when a step begins and stay complete until the stage's last action. Then its
gradients are summed, each replica keeps its part, and the complete parameters are freed. Gathering for every
microbatch would cost m times the traffic. So a rank holds its stages' parameters during a step, and between
steps only its part of parameters, gradients and optimizer state, as in ZeRO-2 (Rajbhandari et al. 2020, §5).
PyTorch's own pipelining runtime does the same with UNSHARD, REDUCE_GRAD and RESHARD.

FSDP2 itself divides gradients by the number of replicas.
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
from zbv_worker.stage.main_gradients import is_half
from zbv_worker.training.gradients import Gradients, squares


class ShardedGradients(Gradients):
    """The gradients of several replicas that each hold a part of every parameter of their stages.

    Parameters
    ----------
    modules
        By stage; sharded in place. Their Linear layers must already defer weight gradients
        (:class:`zbv_worker.stage.stage.Stage` does that), because FSDP2 changes classes too.

    Raises
    ------
    InvalidRun
        If stages share a parameter.
    """

    def __init__(self, modules: Mapping[int, nn.Module], group: dist.ProcessGroup, device: torch.device):
        mesh = DeviceMesh.from_group(group, device.type)
        shared = {id(p) for module in modules.values() for p in module.parameters()}
        if len(shared) < sum(len(list(module.parameters())) for module in modules.values()):
            raise InvalidRun(
                "found a parameter that two stages share, but stages are sharded one by one. Run without "
                "--shard, or do not tie the parameters."
            )
        if any(is_half(p) and p.requires_grad for module in modules.values() for p in module.parameters()):
            raise InvalidRun(
                "--shard: found parameters in half precision; their gradients would be summed in half "
                "precision over the microbatches. Build the model in float32 and pass --precision bfloat16, "
                "or omit --shard."
            )
        self._modules: dict[int, FSDPModule] = {}
        for stage, module in modules.items():
            # Stages without trainable parameters have nothing to shard.
            if any(parameter.requires_grad for parameter in module.parameters()):
                self._modules[stage] = fully_shard(module, mesh=mesh, reshard_after_forward=False)
        super().__init__(modules)

    def begin(self) -> None:
        """Gather every stage's parameters; nothing is summed or freed before the stage's last action."""
        for parameter in self.stages_of:
            parameter.grad = None
        for module in self._modules.values():
            # The module's first forward would do this, but a recomputed stage calls its layers' forwards.
            module._get_fsdp_state()._lazy_init()
            _set_last(module, is_last=False)
            module.unshard()

    def stage_done(self, stage: int) -> None:
        """Sum the stage's gradients and free its complete parameters."""
        module = self._modules.get(stage)
        if module is None:
            return
        _set_last(module, is_last=True)
        # FSDP2 does this in a hook of the backward pass, which is too early: W follows.
        state = module._get_fsdp_state()
        for each in state._state_ctx.all_states:
            for group in each._fsdp_param_groups:
                group.post_backward()
        state._root_post_backward_final_callback()

    def square_sum(self) -> Tensor | None:
        """Each replica contributes the parts that it holds."""
        return squares(_local(gradient) for gradient in self._present())


def _set_last(module: FSDPModule, *, is_last: bool) -> None:
    module.set_is_last_backward(is_last)
    module.set_requires_gradient_sync(is_last)
    module.set_reshard_after_backward(is_last)


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
