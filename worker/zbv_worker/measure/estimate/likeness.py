"""Compares modules, so that each kind of layer is estimated once: most layers of a model are alike.

Two modules are alike if they have the same classes and settings, and tensors of the same shapes that are
shared in the same way. A module with any attribute of another kind, for instance an object, equals no other
module.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type)


@dataclass(frozen=True, eq=False)
class _Itself:
    """An object that equals only itself; kept alive, because a later object could get its id."""

    object: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other.object is self.object

    def __hash__(self) -> int:
        return id(self.object)


def likeness(module: nn.Module, input: Any, place: int) -> Hashable:
    """A hashable description that is equal for two modules exactly if they are alike.

    Parameters
    ----------
    place
        Part of the description: modules at different places are never alike.
    """
    numbers: dict[int, int] = {}
    given = _value(input, numbers)
    around: Hashable = None
    if isinstance(module, nn.Sequential) and len(module) == 1:  # ignore the layer's own name
        around, module = _settings(module, numbers), module[0]
    children = tuple(
        (name, type(child), _settings(child, numbers))
        for name, child in module.named_modules(remove_duplicate=False)
    )
    return place, given, around, children


def _settings(module: nn.Module, numbers: dict[int, int]) -> Hashable:
    """A module's attributes without its children."""
    return tuple((name, _value(value, numbers)) for name, value in vars(module).items() if name != "_modules")


def _value(value: Any, numbers: dict[int, int]) -> Hashable:
    if isinstance(value, Tensor):
        return _tensor(value, numbers)
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, tuple | list):
        return type(value), tuple(_value(each, numbers) for each in value)
    if isinstance(value, set | frozenset):
        return type(value), frozenset(_value(each, numbers) for each in value)
    if isinstance(value, dict):
        return type(value), tuple((_value(k, numbers), _value(v, numbers)) for k, v in value.items())
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), tuple((f.name, _value(getattr(value, f.name), numbers)) for f in fields(value))
    return _Itself(value)


def _tensor(tensor: Tensor, numbers: dict[int, int]) -> Hashable:
    """A tensor's kind and identity; tensors are numbered in the order in which they are found."""
    number = numbers.setdefault(id(tensor), len(numbers))
    kind = tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.requires_grad
    return type(tensor), kind, number
