"""Recognises torch's distributed tensors and modules without importing them, which takes about a second."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether a value is a DTensor. Before anything imports that class, no value can be one."""
    # While another thread imports the module, it is known, but has no such class yet.
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def is_distributed_kind(kind: type) -> bool:
    """Whether a class of tensors is one that tensor parallelism has: DTensors, and results that may be on
    their way.
    """
    module = sys.modules.get("torch.distributed.tensor")
    if module is not None and kind is module.DTensor:
        return True
    module = sys.modules.get("torch.distributed._functional_collectives")
    return module is not None and kind is module.AsyncCollectiveTensor


def local_of(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds, in the same memory; without a graph."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        local: Tensor = tensor.to_local()
    return local


def arrived(tensor: Tensor) -> Tensor:
    """The tensor itself, once its collective is complete.

    The local results of a DTensor's collectives are stand-ins without memory until somebody uses them. A send
    would read that memory.
    """
    module = sys.modules.get("torch.distributed._functional_collectives")
    if module is None or not isinstance(tensor, module.AsyncCollectiveTensor):
        return tensor
    found: Tensor = tensor.wait()
    return found


class DTensorSpec(NamedTuple):
    """What a DTensor is besides its local part."""

    mesh: Any
    placements: Any
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: DTensor) -> DTensorSpec:
        """That of a tensor."""
        return cls(tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())

    def around(self, local: Tensor) -> DTensor:
        """The DTensor of a local part."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )


def with_local(local: Tensor, like: DTensor) -> DTensor:
    """A DTensor of this local part, with everything else as in another one."""
    return DTensorSpec.of(like).around(local)


def parts_of(tensor: Tensor) -> int:
    """The number of parts that a tensor is divided into; 1 for a tensor that every rank holds whole."""
    if not is_dtensor(tensor):
        return 1
    sizes, placements = tensor.device_mesh.shape, tensor.placements
    return math.prod(size for size, place in zip(sizes, placements, strict=True) if not place.is_replicate())


def is_first_holder(tensor: DTensor, first: int) -> bool:
    """Whether this rank stands for the ranks that hold the same part of a DTensor.

    Parameters
    ----------
    first
        The first rank of those with the same stage. It belongs to one of the tensor's groups; other groups
        hold the same parts again.
    """
    mesh = tensor.device_mesh
    place = mesh.get_coordinate()
    if place is None or first not in mesh.mesh.flatten().tolist():
        return False
    return all(at == 0 for at, kind in zip(place, tensor.placements, strict=True) if kind.is_replicate())


def placed_like(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A gradient with the placements of its parameter. Collective if they differ.

    Some operators leave a gradient as parts that are still to be added up (``Partial``).
    """
    if not is_dtensor(gradient) or not is_dtensor(parameter) or gradient.placements == parameter.placements:
        return gradient
    return gradient.redistribute(placements=parameter.placements)


def fully_sharded_modules(module: nn.Module) -> list[Any]:
    """The modules of a tree to which torch's ``fully_shard`` was applied."""
    found = sys.modules.get("torch.distributed.fsdp")
    if found is None:
        return []
    return [child for child in module.modules() if isinstance(child, found.FSDPModule)]
