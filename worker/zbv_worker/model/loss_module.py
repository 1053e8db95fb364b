"""The modules that a loss holds: their parameters are trained and saved with those of the last layer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from zbv_worker.errors import InvalidRun, ModelError
from zbv_worker.model.layer_list import MOST_VALUES, LayerList, shared_names, variables_of
from zbv_worker.model.protocol import Layered, Tied

LOSS = "loss"
"""The name of a loss's module: its parameters are ``loss.…``."""


def loss_module(loss: object, layers: Layered) -> nn.Module | None:
    """The module with all parameters and buffers that a loss holds; None if it holds none.

    That is the loss itself if it is a module. Otherwise it has a child for each module or parameter that is
    found in the arguments of a ``functools.partial``, the object of a method, the attributes of a callable
    object, and the variables that a function uses. Of these, layers of the model, modules that contain them,
    and modules in evaluation mode or without trainable parameters, such as a teacher, are not the loss's.

    Raises
    ------
    InvalidRun
        If a layer has the name of the loss.
    """
    search = _Search(layers)
    search.look(loss, "")
    found = search.found
    whole = found.get("")
    if not isinstance(whole, nn.Module) or len(found) > 1:
        whole = nn.Module()
        for path, value in found.items():
            name = path.replace(".", "_") or "function"
            if isinstance(value, nn.Parameter):
                whole.register_parameter(name, value)
            else:
                whole.add_module(name, value)
    if not any(True for _ in chain(whole.parameters(), whole.buffers())):
        return None
    for name in layers.layer_names():
        if name == LOSS or name.startswith(f"{LOSS}."):
            raise InvalidRun(
                f"found a layer named {name!r} and a loss with parameters or buffers, whose names also begin "
                f"with '{LOSS}.'. Give the layer another name."
            )
    return whole


def ties_of(layers: Layered, loss: nn.Module | None) -> Sequence[tuple[str, str]]:
    """Pairs of names of parameters that layers share, also with their loss."""
    pairs = [*layers.tied_parameters()] if isinstance(layers, Tied) else []
    if isinstance(layers, LayerList) and loss is not None:
        pairs += [pair for pair in shared_names({**layers.existing(), LOSS: loss}) if pair not in pairs]
    return pairs


def require_known_parameters(
    modules: Mapping[int, nn.Module], outputs: Iterable[Tensor], inputs: Collection[Tensor]
) -> None:
    """Refuse outputs or a loss that depend on a parameter which is in no module of the rank.

    Nobody would scale, sum, clip or save its gradient.

    Parameters
    ----------
    modules
        The rank's stages.
    inputs
        The inputs of the graph.
    """
    known = {id(each) for module in modules.values() for each in module.parameters()} | set(map(id, inputs))
    for leaf in _leaves(outputs):
        if id(leaf) not in known:
            raise ModelError(
                f"a layer, or the loss, uses a trainable tensor of shape {list(leaf.shape)} that "
                f"no layer of this rank has. A layer must register its parameters, and a loss with "
                f"parameters must be an nn.Module that has them. If it is a parameter of a layer on another "
                f"rank, register it here too (self.weight = layer.weight): it is then tied. If it is a "
                f"constant, detach it."
            )


def _leaves(outputs: Iterable[Tensor]) -> Iterator[Tensor]:
    """The leaves of a graph."""
    waiting: list[Node] = []
    for tensor in outputs:
        if tensor.grad_fn is not None:
            waiting.append(tensor.grad_fn)
        elif tensor.requires_grad:
            yield tensor
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            yield node.variable
        for other, _ in node.next_functions:
            if other is not None and other not in seen:
                seen.add(other)
                waiting.append(other)


class _Search:
    """Finds modules and parameters in a callable, by the names of variables and attributes."""

    def __init__(self, layers: Layered):
        if isinstance(layers, LayerList):
            given = [*layers.given.values()]
        else:
            given = _modules_among(getattr(layers, "__dict__", {}))
        self._of_layers = {
            id(each) for module in given for each in chain(module.modules(), module.parameters())
        }
        self._seen = {id(layers)}
        self.found: dict[str, nn.Module | nn.Parameter] = {}

    def look(self, value: object, name: str) -> None:
        """Add what a value holds."""
        if id(value) in self._seen or id(value) in self._of_layers:
            return
        self._seen.add(id(value))
        if isinstance(value, nn.Module):
            if any(id(each) in self._of_layers for each in value.modules()):
                self._look_at({**value._parameters, **value._modules}, name)
            elif not name or _seems_trained(value):
                self.found[name] = value
        elif isinstance(value, nn.Parameter):
            if value.requires_grad:
                self.found[name] = value
        elif isinstance(value, dict):  # not any mapping, which may read its values from a file
            self._look_at(value, name)
        elif isinstance(value, list | tuple):
            self._look_at(dict(enumerate(value)), name)
        elif isinstance(value, partial):
            self.look(value.func, name)
            self._look_at({**dict(enumerate(value.args)), **value.keywords}, name)
        elif isinstance(value, MethodType):
            owner = value.__self__
            if isinstance(owner, nn.Module):
                self.look(owner, name)
            elif id(owner) not in self._seen:
                self._look_at(getattr(owner, "__dict__", {}), name)
        elif isinstance(value, FunctionType):
            self._look_at(variables_of(value), name)
        elif callable(value) and not isinstance(value, type):
            self._look_at(getattr(value, "__dict__", {}), name)

    def _look_at(self, values: Mapping[Any, object], name: str) -> None:
        if len(values) > MOST_VALUES:
            return
        for key, value in values.items():
            self.look(value, f"{name}.{key}" if name else str(key))


def _seems_trained(module: nn.Module) -> bool:
    """Whether a module that a variable refers to seems to be trained with the loss."""
    parameters = [*module.parameters()]
    is_here = not any(parameter.is_meta for parameter in parameters)
    return module.training and is_here and (not parameters or any(each.requires_grad for each in parameters))


def _modules_among(values: Mapping[str, object]) -> list[nn.Module]:
    """The modules among the attributes of an object, and in containers of these."""
    return [each for each in tree_leaves(dict(values)) if isinstance(each, nn.Module)]
