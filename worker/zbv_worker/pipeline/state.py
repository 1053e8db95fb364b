"""A pipeline's parameters and buffers by their names in the whole model.

The names do not depend on the plan: ``LAYER.parameter``, where LAYER is the layer's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zbv_worker.errors import InvalidRun
from zbv_worker.model.layer_list import whole_name
from zbv_worker.stage.dtensors import is_dtensor
from zbv_worker.transport.connected import ConnectedTransport

Modules = Mapping[int, nn.Module]
"""A rank's modules, by stage."""


def state_of(modules: Modules) -> dict[str, Any]:
    """A rank's parameters and buffers by name; they share memory with the modules."""
    return {
        whole_name(name): value for module in modules.values() for name, value in module.state_dict().items()
    }


def with_all_names(state: Mapping[str, Any], ties: Sequence[Sequence[str]]) -> Mapping[str, Any]:
    """A state dict with the values of tied parameters under all of their names.

    Raises
    ------
    InvalidRun
        If it has different values for one parameter.
    """
    whole = dict(state)
    for names in ties:
        known = [name for name in names if name in state]
        for other in known[1:]:
            a, b = state[known[0]], state[other]
            if not is_dtensor(a) and not is_dtensor(b) and not torch.equal(a, b.to(a)):
                raise InvalidRun(
                    f"the state dict has different values for {known[0]} and {other}, which are one "
                    f"parameter. Make them equal, or make a Pipeline of layers that do not share it."
                )
        if known:
            whole |= {name: state[known[0]] for name in names if name not in state}
    return whole


def load_state(modules: Modules, state: Mapping[str, Any], layers: Mapping[int, tuple[str, ...]]) -> None:
    """Load a rank's part of a state dict, which may have all layers of the model.

    Parameters
    ----------
    layers
        The names of each stage's layers.

    Raises
    ------
    InvalidRun
        If a name of this rank is missing, a shape differs, or a layer of this rank has no parameter or buffer
        of that name.
    """
    own = state_of(modules)
    missing = sorted(own.keys() - state.keys())
    prefixes = tuple(f"{name}." for names in layers.values() for name in names)
    unknown = sorted(name for name in state if name.startswith(prefixes) and name not in own)
    if missing or unknown:
        found = [f"lacks {', '.join(missing[:5])}"] if missing else []
        found += [f"has {', '.join(unknown[:5])}, which the layers do not have"] if unknown else []
        raise InvalidRun(
            f"the state dict {' and '.join(found)}. Load the state of the same layers, with the names of the "
            f"whole model: layer.parameter."
        )
    try:
        for module in modules.values():
            known = module.state_dict()
            module.load_state_dict({name: _fitting(state[whole_name(name)], known[name]) for name in known})
    except RuntimeError as error:
        raise InvalidRun(f"the state dict does not fit: {error}") from error


def gather_state(modules: Modules, transport: ConnectedTransport, timeout: float) -> dict[str, Any] | None:
    """The whole model's state on the CPU of rank 0; None on other ranks. Collective.

    The tensors travel one by one, so rank 0 needs memory for the model once. Divided tensors are put together
    by the ranks that have their parts.

    Raises
    ------
    InvalidRun
        If a module has an extra state that is no tensor.
    TimeoutError, ConnectionError
        If a rank does not take part.
    """
    own = state_of(modules)
    other = [name for name, value in own.items() if not isinstance(value, Tensor)]
    if other:
        raise InvalidRun(
            f"{other[0]} is not a tensor, and full_state_dict gathers only tensors. Save the state_dict() of "
            f"every rank instead."
        )
    tensors = {name: _whole(value) for name, value in own.items()}
    if transport.column != 0:
        tensors = {}
    listed = [[name, list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in tensors.items()]
    announced = transport.gather(listed, timeout)
    if transport.rank != 0:
        for tensor in tensors.values():
            transport.control.send(_bytes(tensor), 0, timeout)
        return None
    whole = dict[str, Any]()
    for rank, entries in enumerate(announced):
        for name, shape, dtype in entries:
            if rank == 0:
                whole[name] = tensors[name].clone()
                continue
            whole[name] = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
            transport.control.receive(_bytes(whole[name]), rank, timeout)
    return whole


def _whole(value: Tensor) -> Tensor:
    """A tensor on the CPU; collective for a divided one."""
    whole = value.full_tensor() if is_dtensor(value) else value
    return whole.detach().cpu().contiguous()


def _fitting(value: Any, own: Any) -> Any:
    """A value for a tensor of this rank: the rank's part, if that is divided and the value is whole."""
    if not is_dtensor(own) or not isinstance(value, Tensor) or is_dtensor(value) or value.shape != own.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    # Without a source, every rank takes its part of the value that it has.
    return distribute_tensor(value.to(own.device), own.device_mesh, own.placements, src_data_rank=None)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
