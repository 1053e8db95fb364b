"""The files of a checkpoint. Reading them runs no code: tensors are safetensors, everything else is JSON.

::

    index.json                every tensor's shape and the location of its parts; every other value
    checksums.json            of all other files
    rank-00003.safetensors    the parts that rank 3 wrote

Tensors have names that do not depend on the partition. A tensor that the replicas divide (``--shard``) has
one part per replica; a reader takes what it needs from every part.
"""

from __future__ import annotations

import base64
import json
import math
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from zbv_worker.checkpoints.checksums import checksum_of, write_checksums
from zbv_worker.errors import InvalidRun
from zbv_worker.stage.dtensors import is_dtensor

INDEX = "index.json"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Part(_Strict):
    """A block of a tensor: element (0, …) of the block is element ``offsets`` of the tensor."""

    file: Annotated[str, Field(pattern=r"^rank-\d{5,}\.safetensors$")]  # never a path outside the folder
    key: str
    offsets: tuple[NonNegativeInt, ...]
    sizes: tuple[NonNegativeInt, ...]


class _Entry(_Strict):
    shape: tuple[NonNegativeInt, ...]
    parts: list[_Part]


class _Index(_Strict):
    version: Literal[1] = 1
    tensors: dict[str, _Entry] = Field(default_factory=dict)
    values: dict[str, Any] = Field(default_factory=dict)


@dataclass
class State:
    """The state that a rank saves."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """By name."""
    values: dict[str, Any] = field(default_factory=dict)
    """Everything else by name: None, booleans, numbers, strings, bytes, tensors, arrays of numbers, and
    lists, tuples, sets and dictionaries of these."""


Copy = Callable[[str, Tensor], Tensor]
"""Returns a contiguous tensor on the host; takes the tensor's name as well."""


def on_host(name: str, tensor: Tensor) -> Tensor:
    """The tensor itself if it is contiguous and on the host, otherwise a copy."""
    return tensor.detach().cpu().contiguous()


@dataclass(frozen=True)
class RankFiles:
    """The content of one rank's files, ready to be written."""

    rank: int
    tensors: dict[str, Tensor]
    document: str

    @classmethod
    def of(cls, rank: int, state: State, copy: Copy = on_host) -> RankFiles:
        """Encode a rank's state; raises :class:`InvalidRun` for a value that a checkpoint cannot hold."""
        stored = _Stored(_tensors_of(rank), copy)
        entries = {}
        for name, tensor in state.tensors.items():
            offsets, local = _block(tensor)
            entries[name] = _Entry(shape=tuple(tensor.shape), parts=[stored.part(name, offsets, local)])
        values = {name: _encoded(name, value, stored) for name, value in state.values.items()}
        return cls(rank, stored.tensors, _Index(tensors=entries, values=values).model_dump_json())

    def write(self, folder: Path) -> int:
        """Write the files; returns the checksum of the tensors' file. Raises OSError."""
        path = folder / _tensors_of(self.rank)
        try:
            save_file(self.tensors, path)
        except SafetensorError as error:
            raise OSError(None, str(error)) from error
        _sync(path)
        listing = _listing(folder, self.rank)
        listing.write_text(self.document, encoding="utf-8")
        _sync(listing)
        return checksum_of(path)


def _tensors_of(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _listing(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.json"


def _sync(path: Path) -> None:
    with path.open("rb") as opened:
        os.fsync(opened.fileno())


def write_index(folder: Path, checksums: Sequence[int]) -> None:
    """Combine the files of all ranks, which completes the checkpoint. Raises OSError.

    Parameters
    ----------
    checksums
        The results of :meth:`RankFiles.write`, by rank.
    """
    ranks = range(len(checksums))
    tensors: dict[str, _Entry] = {}
    values: dict[str, Any] = {}
    listings = [_listing(folder, rank) for rank in ranks]
    for path in listings:
        found = _parsed(path)
        for name, entry in found.tensors.items():
            parts = tensors[name].parts if name in tensors else []
            tensors[name] = _Entry(shape=entry.shape, parts=[*parts, *entry.parts])
        values |= found.values
    index = folder / f"{INDEX}.part"
    index.write_text(_Index(tensors=tensors, values=values).model_dump_json(), encoding="utf-8")
    _sync(index)
    of_tensors = {_tensors_of(rank): checksums[rank] for rank in ranks}
    write_checksums(folder, {INDEX: checksum_of(index), **of_tensors})
    index.rename(folder / INDEX)
    for path in listings:
        path.unlink()


class Reader:
    """Reads a complete checkpoint.

    Raises
    ------
    InvalidRun
        If the files are not a checkpoint's. The methods raise it too, as well as OSError.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._index = _parsed(folder / INDEX)

    def __contains__(self, name: object) -> bool:
        return name in self._index.tensors or name in self._index.values

    @property
    def tensors(self) -> Collection[str]:
        """The names of all tensors."""
        return self._index.tensors.keys()

    @property
    def names(self) -> Iterator[str]:
        """The names of everything."""
        return chain(self._index.tensors, self._index.values)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor; None for another value."""
        return self._index.tensors[name].shape if name in self._index.tensors else None

    def value_or_tensor(self, name: str, *, like: Tensor | None = None) -> Any:
        """The value or the tensor that was saved under this name, in its dtype.

        Parameters
        ----------
        like
            A tensor of the same shape that is divided among ranks in the same way; None for a whole one.
        """
        entry = self._index.tensors.get(name)
        if entry is None:
            return self.value(name)
        with ExitStack() as stack:
            part = entry.parts[0]
            opened = self._open(part.file, {}, stack)
            few = opened.get_slice(part.key)[:0] if part.sizes else opened.get_tensor(part.key)
        if like is not None:
            target = torch.zeros_like(like, dtype=few.dtype)
        else:
            target = torch.zeros(entry.shape, dtype=few.dtype, device="cpu")
        self.read_into({name: target})
        return target

    def value(self, name: str) -> Any:
        """The value that was saved under this name."""
        if name not in self._index.values:
            raise self._broken(f"it lacks the value {name!r}")
        return _decoded(self._index.values[name], self._tensor)

    def read_into(self, targets: Mapping[str, Tensor]) -> None:
        """Fill tensors, or this rank's parts of them, with the tensors saved under their names."""
        with ExitStack() as stack:
            opened: dict[str, Any] = {}
            for name, target in targets.items():
                entry = self._index.tensors.get(name)
                if entry is None:
                    raise self._broken(f"it lacks the tensor {name!r}")
                if entry.shape != tuple(target.shape):
                    shapes = f"{list(entry.shape)}, but the run's has {list(target.shape)}"
                    raise self._broken(f"its {name!r} has the shape {shapes}")
                self._fill(name, target, entry.parts, lambda file: self._open(file, opened, stack))

    def _fill(
        self, name: str, target: Tensor, parts: Sequence[_Part], open_file: Callable[[str], Any]
    ) -> None:
        offsets, block = _block(target)
        filled = 0
        with torch.no_grad():
            for part in parts:
                overlap = _overlap(offsets, tuple(block.shape), part)
                if overlap is None:
                    continue
                here, there = overlap
                saved = self._read(open_file(part.file), part, there)
                block[here].copy_(saved)
                filled += saved.numel()
        if filled != block.numel():
            raise self._broken(f"it lacks {block.numel() - filled} elements of {name!r}")

    def _read(self, opened: Any, part: _Part, there: tuple[slice, ...]) -> Tensor:
        try:
            if all(s.start == 0 and s.stop == size for s, size in zip(there, part.sizes, strict=True)):
                found: Tensor = opened.get_tensor(part.key)
            else:
                found = opened.get_slice(part.key)[there]
        except SafetensorError as error:
            raise self._broken(f"{part.file}: {error}") from error
        if found.shape != tuple(s.stop - s.start for s in there):
            raise self._broken(f"{part.key!r} in {part.file} has the shape {list(found.shape)}")
        return found

    def _tensor(self, document: Any) -> Tensor:
        """Read a whole tensor that belongs to a value."""
        part = _Part.model_validate(document)
        with ExitStack() as stack:
            whole = tuple(slice(0, size) for size in part.sizes)
            return self._read(self._open(part.file, {}, stack), part, whole)

    def _open(self, file: str, opened: dict[str, Any], stack: ExitStack) -> Any:
        if file not in opened:
            try:
                opened[file] = stack.enter_context(safe_open(self._folder / file, framework="pt"))
            except SafetensorError as error:
                raise self._broken(f"{file}: {error}") from error
        return opened[file]

    def _broken(self, why: str) -> InvalidRun:
        return InvalidRun(
            f"{self._folder} cannot be loaded: {why}. Use the model that wrote it, or remove it to resume "
            f"from an older checkpoint."
        )


def _parsed(path: Path) -> _Index:
    try:
        return _Index.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise InvalidRun(
            f"{path} is not the index of a checkpoint ({where}: {first['msg']}). Remove {path.parent} to "
            f"resume from an older checkpoint."
        ) from None


class _Stored:
    """The tensors of one file. Tensors that share memory, such as tied parameters, are stored once."""

    def __init__(self, file: str, copy: Copy) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._copy = copy
        self._file = file
        self._known: dict[tuple[Any, ...], str] = {}
        self._storages: set[int] = set()

    def part(self, name: str, offsets: tuple[int, ...], tensor: Tensor) -> _Part:
        """Add a block of a tensor; returns its location."""
        key = self._key(name, tensor)
        return _Part(file=self._file, key=key, offsets=offsets, sizes=tuple(tensor.shape))

    def _key(self, name: str, tensor: Tensor) -> str:
        what = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
        if tensor.numel() and what in self._known:
            return self._known[what]
        self._known[what] = name
        copied = self._copy(name, tensor)
        storage = copied.untyped_storage().data_ptr()
        # safetensors refuses two tensors in one storage, even if neither contains the other.
        self.tensors[name] = copied.clone() if storage in self._storages else copied
        self._storages.add(storage)
        return name


def _block(tensor: Tensor) -> tuple[tuple[int, ...], Tensor]:
    """This rank's part of a tensor, and its offsets in the tensor."""
    if not is_dtensor(tensor):
        return (0,) * tensor.dim(), tensor
    # The protocol of torch.distributed.checkpoint; one shard per rank.
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]  # torch's own
    local = tensor.to_local()
    return tuple(chunk.offsets), local


def _overlap(
    offsets: tuple[int, ...], sizes: tuple[int, ...], part: _Part
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """The overlap of a block and a saved part, as slices of each; None if they do not overlap."""
    here, there = [], []
    for begin, size, saved_begin, saved_size in zip(offsets, sizes, part.offsets, part.sizes, strict=True):
        first, last = max(begin, saved_begin), min(begin + size, saved_begin + saved_size)
        if first >= last:
            return None
        here.append(slice(first - begin, last - begin))
        there.append(slice(first - saved_begin, last - saved_begin))
    return tuple(here), tuple(there)


def _encoded(name: str, value: Any, stored: _Stored) -> Any:
    """Encode a value as JSON. An object has one key, the type of the value."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if type(value) is list:
        return [_encoded(f"{name}.{at}", each, stored) for at, each in enumerate(value)]
    if type(value) in (tuple, set):
        return {type(value).__name__: [_encoded(f"{name}.{at}", v, stored) for at, v in enumerate(value)]}
    if type(value) in _MAPPINGS:
        kind = _MAPPINGS[type(value)]
        pairs = [(k, v, f"{name}.{k}") for k, v in value.items()]
        return {kind: [[_encoded(n, k, stored), _encoded(n, v, stored)] for k, v, n in pairs]}
    if isinstance(value, Tensor) and not is_dtensor(value):
        return {"tensor": stored.part(name, (0,) * value.dim(), value).model_dump(mode="json")}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        array = np.ascontiguousarray(value).tobytes()
        what = [value.dtype.str, list(value.shape), base64.b64encode(array).decode()]
        return {"array" if isinstance(value, np.ndarray) else "scalar": what}
    if type(value) is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    raise InvalidRun(
        f"{name} is a {type(value).__name__}, which a checkpoint cannot hold. Must be None, a boolean, a "
        f"number, a string, bytes, a tensor, an array of numbers, or a list, tuple, set or dictionary of "
        "these."
    )


_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}


def _decoded(document: Any, tensor: Callable[[Any], Tensor]) -> Any:
    """Decode a value of :func:`_encoded`."""
    if isinstance(document, list):
        return [_decoded(each, tensor) for each in document]
    if not isinstance(document, dict):
        return document
    try:
        ((kind, content),) = document.items()
        if kind == "tensor":
            return tensor(content)
        return _DECODERS[kind](content if kind in _PLAIN else _decoded(content, tensor))
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRun(
            f"found a value in a checkpoint that cannot be read: {json.dumps(document)[:80]}"
        ) from error


def _array(content: tuple[str, list[int], str]) -> np.ndarray[Any, Any]:
    kind, shape, data = content
    dtype = np.dtype(kind)
    if dtype.kind not in "biufc":
        raise ValueError(f"found an array of {dtype}")
    return np.frombuffer(base64.b64decode(data), dtype).reshape(shape).copy()


_PLAIN = {"float", "bytes", "array", "scalar"}
_DECODERS: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "tuple": tuple,
    "set": set,
    "dict": dict,
    "ordered": OrderedDict,
    "counter": lambda pairs: Counter(dict(pairs)),
    "array": _array,
    "scalar": lambda content: _array(content)[()],
    "bytes": base64.b64decode,
}
