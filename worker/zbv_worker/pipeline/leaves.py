"""The tensors and constants in a batch: which are refused, and what errors call them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

from torch.utils._pytree import keystr

from zbv_worker.errors import InvalidRun
from zbv_worker.model.protocol import Whole


def require_no_container(leaf: object, path: tuple[Any, ...]) -> None:
    """Refuse what seems to have rows and would be passed whole to every microbatch."""
    remedy = None
    if isinstance(leaf, Mapping):
        remedy = "Pass dict(…) of it"
    elif is_dataclass(leaf) and not isinstance(leaf, type | Whole):
        remedy = "Pass its fields in a dict"
    elif type(leaf).__module__ == "numpy" and bool(getattr(leaf, "shape", None)):
        remedy = "Pass torch.from_numpy(…) of it"
    if remedy is not None:
        raise InvalidRun(
            f"{name_of(path)}: found a {type(leaf).__name__}; a batch is split where it has tensors in "
            f"lists, tuples and dicts. {remedy}, or split the batch yourself: "
            f"step(microbatches=[Microbatch(input, target, keywords), …])."
        )


def name_of(path: tuple[Any, ...]) -> str:
    """A tensor's place in the call, for errors."""
    head, *rest = path
    return ("inputs", "targets", "keywords")[head.idx] + keystr(tuple(rest))
