"""The structure of a value: its containers and constants, and the specs of its tensors.

A value is a tensor, a constant (None, bool, int, float, str), or a dict with str keys, list, tuple or named
tuple of values. A mapping of another class arrives as a plain dict. The JSON form of a structure names a
named tuple by its module and class; the reader looks the class up among the modules that it has imported
itself, so no code of a peer runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from torch import Tensor

from zbv_worker.errors import ModelError

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
"""The dtypes of activations: one tensor of these always has a gradient, and travels as it is."""

_DTYPES = {
    str(each).removeprefix("torch."): each for each in vars(torch).values() if type(each) is torch.dtype
}
_CONSTANTS = (bool, int, float, str, type(None))
_MOST_BYTES = 1 << 48
"""The largest tensor that a peer may announce; far more than a device has."""


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor between stages. A tuple, because every receive uses it as a key."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """The spec of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class TensorPlace:
    """The place of a tensor in a tree."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    kind: Literal["tensor"] = "tensor"


@dataclass(frozen=True, eq=False)
class Constant:
    """A constant in a tree; equals constants of the same type with the same text, so that NaN equals NaN."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    value: bool | int | float | str | None
    kind: Literal["constant"] = "constant"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[type, str]:
        return type(self.value), repr(self.value)


@dataclass(frozen=True)
class Container:
    """A container in a tree."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    kind: Literal["dict", "list", "tuple"]
    children: tuple[Node, ...]
    keys: tuple[str, ...] = ()
    """Of a dict, its keys in order; otherwise empty."""
    named: str = ""
    """Of a named tuple, ``MODULE:CLASS``; otherwise empty."""


Node = Annotated["TensorPlace | Constant | Container", Field(discriminator="kind")]


@dataclass(frozen=True)
class Structure:
    """The structure of a value."""

    tree: TensorPlace | Constant | Container
    specs: tuple[TensorSpec, ...]
    """The value's tensors, in the order of the tree."""
    has_gradient: tuple[bool, ...]
    """For each tensor, whether a gradient comes back for it. For a value that is one tensor of
    :data:`FLOATS` always; otherwise for those that require a gradient."""

    @classmethod
    def of(cls, value: Any) -> Structure:
        """The structure of a value; raises :class:`ModelError` if it contains anything else."""
        tensors: list[Tensor] = []
        tree = _tree(value, tensors, "")
        flags = (True,) if is_plain(value) else tuple(tensor.requires_grad for tensor in tensors)
        return cls(tree, tuple(map(TensorSpec.of, tensors)), flags)

    @classmethod
    def of_tensor(cls, spec: TensorSpec) -> Structure:
        """The structure of one floating tensor."""
        return cls(_PLACE, (spec,), (True,))

    @property
    def is_plain(self) -> bool:
        """Whether the value is one tensor of :data:`FLOATS`."""
        return isinstance(self.tree, TensorPlace) and self.specs[0].dtype in FLOATS

    def is_like(self, other: Structure) -> bool:
        """Whether another structure differs at most in the sizes of its tensors' dimensions."""
        return (
            self.has_gradient == other.has_gradient
            and [(len(spec.shape), spec.dtype) for spec in self.specs]
            == [(len(spec.shape), spec.dtype) for spec in other.specs]
            and self.tree == other.tree
        )

    def reshaped(self, dimensions: Sequence[int]) -> Structure:
        """The same structure with other dimensions, those of all tensors one after the other."""
        sizes = iter(dimensions)
        specs = [TensorSpec(tuple(next(sizes) for _ in spec.shape), spec.dtype) for spec in self.specs]
        return replace(self, specs=tuple(specs))

    def tensors(self, value: Any) -> list[Tensor]:
        """The tensors of a value with this structure, in order."""
        return list(tensors_of(value))

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """The value of some tensors, in the order of :meth:`tensors`."""
        return _built(self.tree, iter(tensors))

    def __str__(self) -> str:
        flags = self.has_gradient
        if self.is_plain:
            return str(self.specs[0])
        texts = [
            f"{spec}{' with gradient' if flag else ''}" for spec, flag in zip(self.specs, flags, strict=True)
        ]
        return _text(self.tree, iter(texts))

    def json(self) -> bytes:
        """The structure as JSON, for a peer."""
        tensors = tuple(
            _TensorDocument(spec.shape, str(spec.dtype).removeprefix("torch."), flag)
            for spec, flag in zip(self.specs, self.has_gradient, strict=True)
        )
        # Not dump_json, which writes infinity as null.
        return json.dumps(_DOCUMENT.dump_python(_StructureDocument(self.tree, tensors))).encode()

    @classmethod
    def parse(cls, document: bytes) -> Structure:
        """Read and validate the JSON form; raises :class:`ModelError`."""
        try:
            found = _DOCUMENT.validate_json(document)
        except ValidationError as error:
            first = error.errors()[0]
            raise _invalid(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        specs = []
        for tensor in found.tensors:
            dtype = _DTYPES.get(tensor.dtype)
            if dtype is None:
                raise _invalid(f"found the dtype {tensor.dtype!r}")
            specs.append(TensorSpec(tensor.shape, dtype))
            if specs[-1].nbytes > _MOST_BYTES:
                raise _invalid(f"found a tensor of {specs[-1]}")
        if _places(found.tree) != len(specs):
            raise _invalid(f"found {len(specs)} tensors for {_places(found.tree)} places")
        return cls(found.tree, tuple(specs), tuple(tensor.has_gradient for tensor in found.tensors))


@dataclass(frozen=True)
class _TensorDocument:
    shape: tuple[Annotated[int, Field(ge=0, lt=1 << 48)], ...]
    dtype: str
    has_gradient: bool


@dataclass(frozen=True)
class _StructureDocument:
    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    tree: Node
    tensors: tuple[_TensorDocument, ...]


_DOCUMENT = TypeAdapter(_StructureDocument)


def is_plain(value: Any) -> bool:
    """Whether a value is one tensor of :data:`FLOATS`."""
    return isinstance(value, Tensor) and value.dtype in FLOATS


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors of a value, in the order of its structure; skips everything else."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_of(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_of(each)


def map_tensors(function: Any, value: Any) -> Any:
    """A value with the results of a function in place of its tensors, in new containers."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(function, each) for key, each in value.items()}
    if isinstance(value, tuple):
        items = [map_tensors(function, each) for each in value]
        return type(value)._make(items) if hasattr(value, "_make") else tuple(items)
    if isinstance(value, list):
        return [map_tensors(function, each) for each in value]
    return value


def device_of(value: Any) -> torch.device:
    """The device of a value's first tensor; the CPU if it has none."""
    if isinstance(value, Tensor):
        return value.device
    first = next(tensors_of(value), None)
    return torch.device("cpu") if first is None else first.device


def bytes_of(value: Any) -> int:
    """The bytes of a value's tensors."""
    return value.nbytes if isinstance(value, Tensor) else sum(tensor.nbytes for tensor in tensors_of(value))


def _tree(value: Any, tensors: list[Tensor], path: str) -> TensorPlace | Constant | Container:
    """The tree of a value; adds its tensors to a list."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise ModelError(
                f"found a tensor of layout {value.layout}{_at(path)} between stages; must be dense. Call "
                f"to_dense() on it."
            )
        tensors.append(value)
        return _PLACE
    if type(value) in _CONSTANTS:
        return Constant(value)
    if isinstance(value, Mapping):
        keys = tuple(value)
        wrong = [key for key in keys if type(key) is not str]
        if wrong:
            raise ModelError(
                f"found a dict with the key {wrong[0]!r}{_at(path)} between stages; keys must be str."
            )
        children = tuple(_tree(value[key], tensors, f"{path}[{key!r}]") for key in keys)
        return Container("dict", children, keys=keys)
    if isinstance(value, list | tuple):
        children = tuple(_tree(each, tensors, f"{path}[{at}]") for at, each in enumerate(value))
        named = _name_of(type(value)) if hasattr(value, "_fields") else ""
        return Container("list" if isinstance(value, list) else "tuple", children, named=named)
    raise ModelError(
        f"found a {type(value).__name__}{_at(path)} between stages; must be tensors and constants (None, "
        f"bool, int, float, str) in dicts, lists and tuples. Convert it, or compute it again in the next "
        f"stage."
    )


_PLACE = TensorPlace()


def _built(node: TensorPlace | Constant | Container, tensors: Iterator[Tensor]) -> Any:
    if isinstance(node, TensorPlace):
        return next(tensors)
    if isinstance(node, Constant):
        return node.value
    items = [_built(child, tensors) for child in node.children]
    if node.kind == "dict":
        return dict(zip(node.keys, items, strict=True))
    if node.kind == "list":
        return items
    return _class_of(node.named, len(items))._make(items) if node.named else tuple(items)


def _places(node: TensorPlace | Constant | Container) -> int:
    """The number of tensors in a tree that a peer sent; raises :class:`ModelError` if it is invalid."""
    if not isinstance(node, Container):
        return int(isinstance(node, TensorPlace))
    keys = len(node.children) if node.kind == "dict" else 0
    if len(set(node.keys)) != keys or len(node.keys) != keys or (node.named and node.kind != "tuple"):
        raise _invalid(f"found a {node.kind} of {len(node.children)} values with {len(node.keys)} keys")
    if node.named:
        _class_of(node.named, len(node.children))
    return sum(map(_places, node.children))


@lru_cache
def _name_of(kind: type) -> str:
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _looked_up(name) is not kind:
        raise ModelError(
            f"found the named tuple {kind.__qualname__} between stages, which a peer cannot find by its "
            f"name. Define it at the top of a module."
        )
    return name


@lru_cache
def _class_of(name: str, length: int) -> Any:
    """The class of a named tuple that this process has imported."""
    found = _looked_up(name)
    if not (
        isinstance(found, type) and issubclass(found, tuple) and len(getattr(found, "_fields", ())) == length
    ):
        raise _invalid(f"this rank knows no named tuple {name} of {length} fields; import it in the model")
    return found


def _looked_up(name: str) -> Any:
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


def _text(node: TensorPlace | Constant | Container, texts: Iterator[str]) -> str:
    if isinstance(node, TensorPlace):
        return next(texts)
    if isinstance(node, Constant):
        return repr(node.value)
    items = [_text(child, texts) for child in node.children]
    if node.kind == "dict":
        return "{" + ", ".join(f"{key}: {item}" for key, item in zip(node.keys, items, strict=True)) + "}"
    begin, end = "[]" if node.kind == "list" else "()"
    return f"{node.named.rpartition(':')[2]}{begin}{', '.join(items)}{end}"


def _at(path: str) -> str:
    return f" at {path}" if path else ""


def _invalid(found: str) -> ModelError:
    return ModelError(
        f"the header of an activation is invalid ({found}). Start all ranks with the same version of zbv and "
        f"of the model."
    )
