"""Layers to which the user, or ``--shard``, has applied torch's ``fully_shard``, within a pipeline.

``fully_shard`` gathers parameters in hooks of the forward, and sums gradients over the replicas in hooks of
the backward, before W has computed them. Here it does both once per step:

=====================  ====================================================================================
when                   what happens to the parameters of a layer
=====================  ====================================================================================
first use in a step    ``fully_shard`` gathers them; they stay whole
the stage's last       their gradients' sum over the replicas starts, and the whole parameters are freed; the
  action               actions of other stages go on meanwhile
the end of the step    the device waits for the sums; the optimizer sees only the parts
=====================  ====================================================================================

With the reduction switched off, the hooks of the backward only collect gradients. The sum is started as in
torch's own runtime for pipelines (``perform_reduce_grad`` in ``torch/distributed/pipelining/stage.py`` of
torch 2.13): by methods that are not public, because there is no public one. A torch that lacks one of them is
refused at the start (:data:`_MEMBERS`).

On a GPU, gathers and sums run on three streams of ``fully_shard``. The compute stream waits for a gather at
the first use, and for a sum before the next one starts; docs/nccl-model.md says how that is tested.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zbv_worker.errors import InvalidRun
from zbv_worker.stage.dtensors import fully_sharded_modules
from zbv_worker.stage.weight_grads import HALVES
from zbv_worker.transport.channels import Transport
from zbv_worker.transport.connected import ConnectedTransport

_MEMBERS = {
    "the state of a module": (
        "_comm_ctx",
        "_fsdp_param_groups",
        "_is_root",
        "_lazy_init",
        "_root_post_backward_final_callback",
    ),
    "the streams": ("lazy_init",),
    "a group of parameters": ("fsdp_params", "mesh_info", "post_backward"),
    "a parameter": (
        "_unsharded_param",
        "accumulate_unsharded_grad_if_needed",
        "sharded_param",
        "to_accumulated_grad_if_needed",
    ),
}
"""What this module uses of ``fully_shard`` and torch does not document, by where it is."""


class FullySharded:
    """The modules with ``fully_shard`` of one rank's stages.

    Parameters
    ----------
    modules
        By stage.
    copies
        The global ranks of the replicas, this rank included. The loss is divided by all of them, so
        gradients are added up over them; over further ranks of ``fully_shard``'s mesh they are averaged.
        None if the caller has set the factors of the sums.

    Attributes
    ----------
    parameters
        The parts of parameters that ``fully_shard`` manages.

    Raises
    ------
    InvalidRun
        If a mesh lacks a replica, which would train on without the others, or if this version of torch has
        another ``fully_shard``.
    """

    def __init__(self, modules: Mapping[int, nn.Module], copies: tuple[int, ...] | None):
        self._of_stage = {stage: fully_sharded_modules(module) for stage, module in modules.items()}
        self._all: list[Any] = list(dict.fromkeys(m for some in self._of_stage.values() for m in some))
        self.parameters: set[nn.Parameter] = set()
        self._require_members()
        for group in self._groups(self._all):
            self.parameters.update(each.sharded_param for each in group.fsdp_params)
            ranks = set(group.mesh_info.mesh.mesh.flatten().tolist())
            if not ranks.issuperset(copies or ()):
                raise InvalidRun(
                    f"found fully_shard over the ranks {sorted(ranks)}; the replicas of this rank are "
                    f"{sorted(copies or ())}. Pass it all data-parallel dimensions of the mesh, for example "
                    f"mesh['dp'], or mesh['dp_replicate', 'dp_shard']."
                )
        for module in self._all:
            self._divide(module, None if copies is None else len(copies))
        if self._all:
            from torch.distributed.fsdp import share_comm_ctx

            # Streams per layer could share a CUDA stream with a receive that waits.
            share_comm_ctx(self._all)
            context = self._all[0]._get_fsdp_state()._comm_ctx
            # Now, because the first forward of a stage would empty what the stages share, such as the order
            # of the forwards, after another stage has used it.
            for root in self._roots(modules.values()):
                if hasattr(context, "reduce_scatter_stream"):
                    # Each root would make new streams. There are 32 per GPU, then the first come again.
                    context.lazy_init = lambda device: None
                root._get_fsdp_state()._lazy_init()

    def _require_members(self) -> None:
        """Raise :class:`InvalidRun` if torch lacks what :data:`_MEMBERS` lists."""
        for module in self._all:
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", [])
            parts = [[state], [getattr(state, "_comm_ctx", None)], groups]
            parts.append([each for group in groups for each in getattr(group, "fsdp_params", [])])
            for (what, names), owners in zip(_MEMBERS.items(), parts, strict=True):
                lacking = [name for name in names for owner in owners if not _has(owner, name)]
                if lacking:
                    raise InvalidRun(
                        f"fully_shard of torch {torch.__version__}: {what} lacks {lacking[0]}; must be as in "
                        f"torch 2.13. Install that version, or let the replicas sum whole gradients, without "
                        f"fully_shard."
                    )

    def _divide(self, module: Any, replicas: int | None) -> None:
        info = next((group.mesh_info for group in self._groups([module])), None)
        if info is not None:
            if replicas is not None:
                shards = getattr(info, "shard_mesh_size", 1) * getattr(info, "replicate_mesh_size", 1)
                module.set_gradient_divide_factor(shards / replicas)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other

    def begin(self) -> None:
        """Call before a step's first action: from now on gradients are only collected."""
        for module in self._all:
            module.set_is_last_backward(False)
            module.set_requires_gradient_sync(False, recurse=False)
            module.set_reshard_after_backward(False, recurse=False)
            module.set_reshard_after_forward(False, recurse=False)

    def stage_done(self, stage: int) -> None:
        """Call after a stage's last action: start the sums of its gradients, and free its parameters."""
        modules = self._of_stage[stage]
        for module in modules:
            module.set_is_last_backward(True)
            module.set_requires_gradient_sync(True, recurse=False)
            module.set_reshard_after_backward(True, recurse=False)
        self.widen(stage)  # torch sums only gradients of equal dtypes
        for group in self._groups(reversed(modules)):
            group.post_backward()

    def widen(self, stage: int) -> None:
        """Call after W: add its gradients to those that are collected, in the dtype of their sum.

        ``fully_shard`` does so after each backward, when W has not computed them yet.
        """
        for group in self._groups(self._of_stage[stage]):
            for parameter in group.fsdp_params:
                if hasattr(parameter, "_unsharded_param"):
                    parameter.accumulate_unsharded_grad_if_needed()
                    parameter.to_accumulated_grad_if_needed()

    def finish(self) -> None:
        """Call after a step's last action: make the device wait for the sums."""
        for module in self._all:
            state = module._get_fsdp_state()
            if state._is_root:
                state._root_post_backward_final_callback()

    def free(self) -> None:
        """Call after an evaluation, which gathers parameters without a backward."""
        for module in self._all:
            module.reshard()

    @classmethod
    def _roots(cls, modules: Iterable[nn.Module]) -> list[Any]:
        """The outermost modules with ``fully_shard``."""
        found: list[Any] = []
        for module in modules:
            found += [module] if module in fully_sharded_modules(module) else cls._roots(module.children())
        return list(dict.fromkeys(found))

    @staticmethod
    def _groups(modules: Any) -> list[Any]:
        """The groups of parameters that are gathered at once; several modules may share one."""
        found = (group for module in modules for group in module._get_fsdp_state()._fsdp_param_groups)
        return list(dict.fromkeys(found))


def _has(owner: object, name: str) -> bool:
    """Whether an object has a member, perhaps one that is set later."""
    return hasattr(owner, name) or name in getattr(type(owner), "__annotations__", {})


def dividing(transport: Transport, device: torch.device) -> Callable[[nn.Module], None]:
    """How the replicas of this run divide the parameters of a stage, in place.

    The layers of an ``nn.Sequential`` are gathered one by one, any other stage at once. A parameter that
    several layers of a stage share stays whole, as do those of a loss. Gradients of parameters in half
    precision are summed in float32. A stage whose builder has applied ``fully_shard`` stays as it is.

    Raises
    ------
    InvalidRun
        If there is one replica; and from the result, if a parameter cannot be divided.
    """
    group = transport.replica_group if isinstance(transport, ConnectedTransport) else None
    if group is None:
        raise InvalidRun(
            "--shard: found one replica; parameters are divided among several. Pass --data-parallel."
        )
    return partial(divide, group=group, device=device)


def divide(module: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
    """See :func:`dividing`."""
    # Imported here because DTensor takes a second.
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if fully_sharded_modules(module):
        return
    layers = list(module) if isinstance(module, nn.Sequential) else [module]
    users = Counter(parameter for layer in dict.fromkeys(layers) for parameter in layer.parameters())
    shared = {parameter for parameter, count in users.items() if count > 1}
    mesh = DeviceMesh.from_group(group, device.type)
    for layer in dict.fromkeys(layers):
        _require_divisible(layer, shared)
        has_halves = any(parameter.dtype in HALVES for parameter in layer.parameters())
        policy = MixedPrecisionPolicy(
            reduce_dtype=torch.float32 if has_halves else None, cast_forward_inputs=False
        )
        fully_shard(layer, mesh=mesh, mp_policy=policy, ignored_params=shared)


def _require_divisible(layer: nn.Module, shared: set[nn.Parameter]) -> None:
    """Raise :class:`InvalidRun` for what ``fully_shard`` refuses without a remedy, or would ignore."""
    require_dense(layer)
    dtypes: set[torch.dtype] = set()
    for name, parameter in layer.named_parameters():
        which = f"--shard: found a parameter {name!r} of a {type(layer).__name__}"
        if parameter in shared:
            continue
        if parameter.dim() == 0:
            raise InvalidRun(
                f"{which} without dimensions; parameters are divided by rows. Give it the shape (1,)."
            )
        hooks: Any = parameter
        if hooks._backward_hooks or hooks._post_accumulate_grad_hooks:
            raise InvalidRun(
                f"{which} with a hook, which would not see the gradient: torch's fully_shard computes with "
                f"another tensor. Remove the hook, or omit --shard."
            )
        if parameter.requires_grad:
            dtypes.add(parameter.dtype)
    if len(dtypes) > 1:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise InvalidRun(
            f"--shard: found trainable parameters of {names} in one {type(layer).__name__}; torch's "
            f"fully_shard needs one type per layer. Convert the layer, or omit --shard."
        )


def require_dense(module: nn.Module) -> None:
    """Raise :class:`InvalidRun` if a module has sparse gradients."""
    for name, child in module.named_modules():
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse:
            raise InvalidRun(
                f"found a sparse embedding, {name or 'the stage itself'}; gradients that replicas sum must "
                f"be dense. Build it with sparse=False."
            )
