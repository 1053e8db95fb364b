"""What optimizers and checkpoints see of a pipeline: parameters and buffers, by names in the whole model.

The names do not depend on the plan: ``LAYER.parameter``, where LAYER is the layer's name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from zbv_worker.checkpoints.checkpoint import DEFAULT_KEPT, DEFAULT_TIMEOUT, CheckpointOptions
from zbv_worker.errors import InvalidRun
from zbv_worker.failures.failures import Failures
from zbv_worker.model.layer_list import whole_name
from zbv_worker.pipeline.checkpoints import PipelineCheckpoints, Stateful, training_state
from zbv_worker.pipeline.preparing import Prepared
from zbv_worker.pipeline.rank import PipelineRank
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


class PipelineState:
    """The parameters of this rank's layers, the state of the whole model, and checkpoints of both.

    Attributes
    ----------
    modules
        This rank's modules, by stage.
    """

    def __init__(
        self,
        prepared: Prepared,
        own: PipelineRank,
        transport: ConnectedTransport,
        failures: Failures,
        saving: list[PipelineCheckpoints],
        timeout: float,
    ) -> None:
        self.modules: Mapping[int, nn.Module] = MappingProxyType(prepared.modules)
        self._own, self._transport, self._failures = own, transport, failures
        self._layers, self._saving, self._timeout = prepared.layers, saving, timeout
        self._no_parameter = ("no_parameter", nn.Parameter(torch.empty(0, device=own.device)))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters with their names in the whole model, each parameter once.

        A tied parameter has its first name in the model on every rank that has a copy. A rank without a
        trainable parameter also gets one without elements, because torch's optimizers refuse an empty list.
        """
        named = [*self._own.ties.named_parameters()]
        if any(parameter.requires_grad for _, parameter in named):
            return iter(named)
        self._no_parameter[1].requires_grad_(True)  # the user may have frozen all parameters
        return iter([*named, self._no_parameter])

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, each once."""
        return (parameter for _, parameter in self.named_parameters())

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm over the whole model is at most ``max_norm``.

        Returns the norm before, a scalar tensor. A parameter that several layers share counts once.
        """
        with self._failures.watched("clipping gradients"):
            return self._own.clip(max_norm)

    def state_dict(self) -> dict[str, Any]:
        """This rank's parameters and buffers by their names in the whole model; they are not copied."""
        return state_of(self.modules)

    def full_state_dict(self) -> dict[str, Any] | None:
        """The whole model's parameters and buffers on the CPU, on rank 0; None on other ranks."""
        with self._failures.watched("gathering the model"):
            self._own.join("full_state_dict")
            self._own.check_ties("gathering the model")
            return gather_state(self.modules, self._transport, self._timeout)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's part of a state dict of the whole model; raises :class:`InvalidRun`.

        A tied parameter needs only one of its names.
        """
        load_state(self.modules, with_all_names(state, self._own.ties.names), self._layers)

    def checkpoints(
        self,
        directory: str | Path,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        schedule: Stateful | Sequence[Stateful] | None = None,
        *,
        data: Stateful | None = None,
        kept: int = DEFAULT_KEPT,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> PipelineCheckpoints:
        """Resume from the newest checkpoint of a directory, if it has one, and save others there.

        A checkpoint has the parameters, buffers, optimizers, schedules, random number generators (of torch
        and Python), the state of the data, and the number of steps. Its format, and the rules of its
        directory, are those of ``zbv-worker run``. It fits other plans and other numbers of ranks.

        Parameters
        ----------
        directory
            All ranks must share it. A pipeline that uses it later takes it over.
        optimizer
            The optimizer of this rank's parameters, or several.
        schedule
            The learning-rate schedule, or several.
        data
            A data loader with a state, such as torchdata's ``StatefulDataLoader``; saved per rank.
        kept
            How many of the newest checkpoints to keep.
        timeout
            Seconds to wait for the slowest rank's files.

        Raises
        ------
        InvalidRun
            If the newest checkpoint belongs to another model, or the ranks see different directories.
        """
        with self._failures.watched("resuming from a checkpoint"):
            self._own.join("checkpoints")
        options = CheckpointOptions(Path(directory), every=1, kept=kept, timeout=timeout)
        own = self._own
        trained = training_state(self.modules, optimizer, schedule, data, own.ties, own.loss_scale)
        made = PipelineCheckpoints(options, trained, self._transport, own.device, self._failures, own.join)
        self._saving.append(made)
        return made
