"""Splits a batch into a plan's microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

from zbv_worker.errors import InvalidRun
from zbv_worker.model.protocol import Microbatch


class StepData:
    """The microbatches of the current step, from which the executor takes those that its rank needs."""

    def __init__(self) -> None:
        self.microbatches: Sequence[Microbatch] = ()

    def microbatch(self, step: int, index: int) -> Microbatch:
        """A microbatch of the current step."""
        return self.microbatches[index]


def microbatches_of(
    inputs: Any, targets: Any, keywords: Mapping[str, Any], given: Sequence[Any] | None, count: int
) -> list[Microbatch]:
    """The microbatches of a call of ``step`` or ``evaluate``.

    Parameters
    ----------
    given
        Microbatches that the user has split; None to split the batch.
    count
        The plan's number of microbatches.

    Raises
    ------
    InvalidRun
        If there are both, or the batch cannot be split.
    """
    if given is None:
        return split_batch(inputs, targets, keywords, count)
    if inputs is not None or targets is not None or keywords:
        raise InvalidRun(
            "found a batch and microbatches=; pass one of them. Every microbatch has its own input, target "
            "and keywords."
        )
    if len(given) != count:
        raise InvalidRun(
            f"found {len(given)} microbatches; the plan has {count}. Pass {count} microbatches, or plan for "
            f"{len(given)}."
        )
    return [_as_microbatch(each, at) for at, each in enumerate(given)]


def split_batch(inputs: Any, targets: Any, keywords: Mapping[str, Any], count: int) -> list[Microbatch]:
    """Split a batch into ``count`` equal microbatches, which are views of it.

    Every tensor is split along its first dimension, wherever it is in nested lists, tuples and dicts.
    Everything else, tensors without dimensions too, is passed to every microbatch.

    Raises
    ------
    InvalidRun
        If the tensors have different numbers of rows, or ``count`` does not divide them, or there is another
        container or an array of NumPy.
    """
    leaves, structure = tree_flatten_with_path((inputs, targets, dict(keywords)))
    for path, leaf in leaves:
        _require_no_container(leaf, path)
    _check_rows({_name(path): leaf.shape[0] for path, leaf in leaves if _is_split(leaf)}, count)
    parts = [leaf.split(leaf.shape[0] // count) if _is_split(leaf) else (leaf,) * count for _, leaf in leaves]
    return [Microbatch(*tree_unflatten([part[at] for part in parts], structure)) for at in range(count)]


def _check_rows(rows: Mapping[str, int], count: int) -> None:
    """Check the number of rows of every tensor, by name."""
    if not rows:
        return
    first, expected = next(iter(rows.items()))
    for name, found in rows.items():
        if found != expected:
            raise InvalidRun(
                f"{first} has {expected} rows and {name} has {found}; the first dimension of every tensor "
                f"must be the batch. Give tensors that are no part of the batch to each microbatch: "
                f"step(microbatches=[Microbatch(input, target, keywords), …])."
            )
    if expected == 0 or expected % count:
        raise InvalidRun(
            f"{first} has {expected} rows; must be a multiple of the plan's {count} microbatches. Change the "
            f"batch size, for instance with drop_last=True in the DataLoader, or plan for another number of "
            f"microbatches."
        )


def _require_no_container(leaf: object, path: tuple[Any, ...]) -> None:
    """Refuse what seems to have rows and would be passed whole to every microbatch."""
    remedy = None
    if isinstance(leaf, Mapping):
        remedy = "Pass dict(…) of it"
    elif is_dataclass(leaf) and not isinstance(leaf, type):
        remedy = "Pass its fields in a dict"
    elif type(leaf).__module__ == "numpy" and bool(getattr(leaf, "shape", None)):
        remedy = "Pass torch.from_numpy(…) of it"
    if remedy is not None:
        raise InvalidRun(
            f"{_name(path)}: found a {type(leaf).__name__}; a batch is split where it has tensors in lists, "
            f"tuples and dicts. {remedy}, or split the batch yourself: "
            f"step(microbatches=[Microbatch(input, target, keywords), …])."
        )


def _is_split(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def _name(path: tuple[Any, ...]) -> str:
    """A tensor's place in the call, for errors."""
    head, *rest = path
    return ("inputs", "targets", "keywords")[head.idx] + keystr(tuple(rest))


def _as_microbatch(given: Any, at: int) -> Microbatch:
    if isinstance(given, Microbatch):
        return given
    if isinstance(given, tuple) and 1 <= len(given) <= len(Microbatch._fields):
        return Microbatch(*given)
    raise InvalidRun(
        f"microbatches[{at}]: found a {type(given).__name__}; must be a Microbatch, or a tuple of input, "
        f"target and keywords."
    )
