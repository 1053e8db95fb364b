"""Layers that a user gives one by one, as a model that can be cut between any two of them.

Every rank builds only the layers of its stages. A parameter has the same name in every partition: the
layer's name and its own.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, pairwise
from types import FunctionType, MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from zbv_worker.errors import InvalidRun, describe_error
from zbv_worker.model.protocol import Layered

logger = logging.getLogger(__name__)

Layer = nn.Module | Callable[[], nn.Module]
"""A module, or a function without arguments that builds one."""

MOST_VALUES = 1000
"""Containers with more values, such as data sets, are not searched for modules."""

Layers = Sequence[Layer] | Mapping[str, Layer] | nn.Module | Layered
"""Layers in model order: a list, a mapping by name, an ``nn.Sequential``, or a :class:`Layered` object."""


class LayerList:
    """A model given by its layers; see :class:`zbv_worker.model.Layered`.

    Given modules are used as they are: to build a layer is to move its module to the device. Given functions
    build a new module each time. They run on the CPU, with torch's random numbers seeded by the layer's
    place, so that a layer has the same initial parameters on every rank and in every partition.

    Parameters
    ----------
    layers
        By name, in model order.
    seed
        Seed of the functions' random numbers; torch's own (``torch.manual_seed``) by default.

    Raises
    ------
    InvalidRun
        If there are no layers, a name cannot be used, or a layer is neither a module nor a function.
    """

    def __init__(self, layers: Mapping[str, Layer], seed: int | None = None):
        self._layers = dict(layers)
        self._seed = torch.initial_seed() if seed is None else seed
        if not layers:
            raise InvalidRun("found no layers; a model must have at least one.")
        for name, layer in layers.items():
            if not isinstance(name, str) or not name or "/" in name:
                raise InvalidRun(f"layers: found the name {name!r}; must be text without '/'.")
            if not callable(layer):
                raise InvalidRun(
                    f"layer {name}: found a {type(layer).__name__}; must be an nn.Module, or a function "
                    f"without arguments that returns one."
                )

    def layer_names(self) -> tuple[str, ...]:
        """The names of all layers, in model order."""
        return tuple(self._layers)

    def build_layers(self, names: Sequence[str], device: torch.device) -> nn.Sequential:
        """Some layers on a device; raises :class:`InvalidRun` if a function does not return a module."""
        return stacked({name: self._built(name, device) for name in names})

    def build_stage(self, stage: int, n_stages: int, device: torch.device) -> nn.Sequential:
        """Stage ``stage`` of ``n_stages``, which have about equal numbers of layers."""
        return self.build_layers(even_partition(self.layer_names(), n_stages)[stage], device)

    def tied_parameters(self) -> list[tuple[str, str]]:
        """Pairs of names of what existing modules share; see :func:`shared_names`."""
        return shared_names(self.existing())

    def existing(self) -> dict[str, nn.Module]:
        """The given modules, and what functions return of modules that they refer to.

        Such functions are called on the meta device, so that what they build new has no memory.
        """
        found = {}
        for name, layer in self._layers.items():
            if isinstance(layer, nn.Module):
                found[name] = layer
            elif (part := _existing_part(layer)) is not None:
                found[name] = part
        return found

    @property
    def given(self) -> dict[str, nn.Module]:
        """The layers that are modules, not functions."""
        return {name: layer for name, layer in self._layers.items() if isinstance(layer, nn.Module)}

    def untouched(self) -> LayerList:
        """The same layers, built as copies: training them does not change the given modules."""
        made = {
            name: partial(copy.deepcopy, layer) if isinstance(layer, nn.Module) else layer
            for name, layer in self._layers.items()
        }
        return LayerList(made, self._seed)

    def _built(self, name: str, device: torch.device) -> nn.Module:
        layer = self._layers[name]
        if isinstance(layer, nn.Module):
            return without_memory(layer) if device.type == "meta" else layer.to(device)
        place = device if device.type == "meta" else torch.device("cpu")
        with torch.random.fork_rng(devices=[]), place:
            torch.manual_seed(mixed(self._seed, list(self._layers).index(name)))
            try:
                module = layer()
            except TypeError as error:
                raise InvalidRun(
                    f"layer {name}: calling it without arguments failed: {describe_error(error)}. A layer "
                    f"must be an nn.Module, or a function without arguments that returns one."
                ) from error
        if not isinstance(module, nn.Module):
            raise InvalidRun(
                f"layer {name}: the function returned a {type(module).__name__}; must return an nn.Module."
            )
        return module.to(device)


def as_layered(layers: Layers, seed: int | None = None) -> Layered:
    """Layers in any form as one object.

    Parameters
    ----------
    layers
        The children of an ``nn.Sequential`` keep their names; the layers of a list are named by their places.
    seed
        As of :class:`LayerList`.

    Raises
    ------
    InvalidRun
        If they are no layers.
    """
    if isinstance(layers, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        # Not named_children, which leaves out the second use of a shared module.
        return LayerList(cast("Mapping[str, Layer]", layers._modules), seed)
    if isinstance(layers, Layered):
        return layers
    if isinstance(layers, Mapping):
        return LayerList(layers, seed)
    if isinstance(layers, list | tuple):
        return LayerList({str(place): layer for place, layer in enumerate(layers)}, seed)
    raise InvalidRun(
        f"layers: found a {type(layers).__name__}; must be a list of layers, a mapping of names to layers, "
        f"an nn.Sequential, or an object with layer_names and build_layers."
    )


def shared_names(modules: Mapping[str, nn.Module]) -> list[tuple[str, str]]:
    """Pairs of names of parameters that are one tensor, and of buffers of modules that are used twice.

    Parameters
    ----------
    modules
        By their names in the whole model, in model order.

    Raises
    ------
    InvalidRun
        If different parameters of two modules have memory in common: on two ranks, they would not.
    """
    first: dict[object, str] = {}
    pairs, memory = [], dict[int, list[tuple[int, int, str, str]]]()
    for prefix, whole in modules.items():
        for path, module in whole.named_modules(prefix=prefix, remove_duplicate=False):
            tensors: dict[str, object] = {n: id(p) for n, p in module._parameters.items() if p is not None}
            tensors |= {n: (id(module), n) for n, buffer in module._buffers.items() if buffer is not None}
            for name, identity in tensors.items():
                known = first.setdefault(identity, f"{path}.{name}")
                if known != f"{path}.{name}":
                    pairs.append((known, f"{path}.{name}"))
                elif isinstance(identity, int):
                    _claim_memory(prefix, known, module.get_parameter(name), memory)
    return pairs


def _claim_memory(
    prefix: str, name: str, parameter: Tensor, memory: dict[int, list[tuple[int, int, str, str]]]
) -> None:
    """Note the memory of a parameter: begin, end, module and name by storage; raises :class:`InvalidRun`."""
    if type(parameter) is not nn.Parameter or parameter.device.type == "meta" or not parameter.numel():
        return
    begin = parameter.data_ptr()
    extent = sum((n - 1) * step for n, step in zip(parameter.shape, parameter.stride(), strict=True)) + 1
    end = begin + extent * parameter.itemsize
    claimed = memory.setdefault(parameter.untyped_storage().data_ptr(), [])
    for other_begin, other_end, other_prefix, other in claimed:
        if prefix != other_prefix and begin < other_end and other_begin < end:
            raise InvalidRun(
                f"layers: {other} and {name} are different parameters with common memory, which they would "
                f"not have on two ranks. Assign the parameter itself to both layers, or copy the values."
            )
    claimed.append((begin, end, prefix, name))


def _existing_part(function: Callable[[], nn.Module]) -> nn.Module | None:
    """A layer without the parameters and buffers that its function makes new; None if all are new."""
    known = {id(each) for module in _modules_of(function, set()) for each in _parts_of(module)}
    if not known:
        return None
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            layer = function()
        modules = [*layer.modules()]
    except Exception as error:
        # It may need a device. The rank that has the layer builds it, and sees whether it works.
        logger.warning(
            "a layer's function fails on the meta device (%s), so parameters that it shares with modules of "
            "other ranks are not found; give such layers as modules",
            describe_error(error),
        )
        return None
    for module in modules:
        if id(module) not in known:
            module._buffers.clear()
            for name, parameter in module._parameters.items():
                module._parameters[name] = parameter if id(parameter) in known else None
    return layer


def _parts_of(value: nn.Module | nn.Parameter) -> Iterator[object]:
    if isinstance(value, nn.Module):
        yield from chain(value.modules(), value.parameters())
    else:
        yield value


def _modules_of(value: object, seen: set[int]) -> Iterator[nn.Module | nn.Parameter]:
    """The modules and parameters that a function, and what it refers to, refer to."""
    if id(value) in seen or (isinstance(value, partial) and value.func is copy.deepcopy):
        return
    seen.add(id(value))
    if isinstance(value, nn.Module | nn.Parameter):
        yield value
        return
    parts: Sequence[object] = ()
    if isinstance(value, list | tuple):
        parts = value
    elif isinstance(value, dict):
        parts = [*value.values()]
    elif isinstance(value, partial):
        parts = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, MethodType):
        parts = [value.__func__, value.__self__, *getattr(value.__self__, "__dict__", {}).values()]
    elif isinstance(value, FunctionType):
        parts = [*variables_of(value).values()]
    elif callable(value) and not isinstance(value, type):
        parts = [*getattr(value, "__dict__", {}).values()]
    if len(parts) <= MOST_VALUES:
        for part in parts:
            yield from _modules_of(part, seen)


def variables_of(function: FunctionType) -> dict[Any, object]:
    """The modules and parameters among a function's global variables, and the variables around it."""
    used = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    found = {name: each for name, each in used.items() if isinstance(each, nn.Module | nn.Parameter)}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # a variable that has no value yet
            found[name] = cell.cell_contents
    return {**dict(enumerate(function.__defaults__ or ())), **(function.__kwdefaults__ or {}), **found}


def stacked(layers: Mapping[str, nn.Module]) -> nn.Sequential:
    """Modules in order, with their layers' names.

    A name of a module must not have a dot, so dots become slashes: :func:`whole_name` turns them back.
    """
    return nn.Sequential(OrderedDict((name.replace(".", "/"), layer) for name, layer in layers.items()))


def whole_name(parameter: str) -> str:
    """A parameter's name in the whole model (``block.3.norm.weight``), from its name in :func:`stacked`."""
    return parameter.replace("/", ".")


def even_partition(names: Sequence[str], n_stages: int) -> tuple[tuple[str, ...], ...]:
    """Divide layers into stages of about equal number, ignoring their costs."""
    bounds = [stage * len(names) // n_stages for stage in range(n_stages + 1)]
    return tuple(tuple(names[begin:end]) for begin, end in pairwise(bounds))


def mixed(*numbers: int) -> int:
    """One seed from several numbers, so that similar numbers give uncorrelated seeds."""
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:7])


def without_memory(module: nn.Module) -> nn.Module:
    """A copy on the meta device, which never holds the values."""
    empty: dict[int, Tensor] = {}
    for parameter in module.parameters():
        made = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        vars(made).update(vars(parameter))
        empty[id(parameter)] = made
    for buffer in module.buffers():
        empty[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(module, dict[int, object](empty))
