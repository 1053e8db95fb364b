"""``--shard``: torch's ``fully_shard`` applied to the layers of a run, over its replicas.

:mod:`zbv_worker.gradients.fully_sharded` says when parameters are gathered and gradients summed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zbv_worker.errors import InvalidRun
from zbv_worker.gradients.buckets import require_dense
from zbv_worker.stage.dtensors import fully_sharded_modules
from zbv_worker.stage.main_gradients import is_half
from zbv_worker.transport.channels import Transport
from zbv_worker.transport.connected import ConnectedTransport


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
        has_halves = any(map(is_half, layer.parameters()))
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
