"""Splits a batch into a plan's microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map_only, tree_unflatten

from zbv_worker.errors import InvalidRun
from zbv_worker.model.protocol import Microbatch, Whole
from zbv_worker.pipeline.packed import name_of, require_no_container, split_packed
from zbv_worker.stage.layers import Keywords
from zbv_worker.stage.whole_batch import Ambiguous

_ANY = Keywords(takes_any=True)
_KEYWORDS = Microbatch._fields.index("keywords")


class StepData:
    """The microbatches of the current step, from which the executor takes those that its rank needs."""

    def __init__(self) -> None:
        self.microbatches: Sequence[Microbatch] = ()

    def microbatch(self, step: int, index: int) -> Microbatch:
        """A microbatch of the current step."""
        return self.microbatches[index]


@dataclass
class Batch:
    """What a call of ``step`` or ``evaluate`` was given; see :meth:`zbv_worker.Pipeline.step`."""

    inputs: Any
    targets: Any
    keywords: Mapping[str, Any]
    microbatches: Sequence[Any] | None
    cu_seqlens: Tensor | Sequence[int] | None = None
    sequences: Sequence[Sequence[int]] | None = None
    is_even: bool = field(init=False)
    """Whether it is split into microbatches of equal shapes."""

    def __post_init__(self) -> None:
        self.is_even = self.microbatches is None and self.cu_seqlens is None

    @property
    def is_given(self) -> bool:
        """Whether there is anything."""
        given = (self.inputs, self.targets, self.microbatches, self.cu_seqlens)
        return any(each is not None for each in given) or bool(self.keywords)

    def require_gradients_can_arrive(self, *, has_first_layer: bool) -> None:
        """Refuse tensors whose gradients a step does not compute; call before a step, not an evaluation.

        Parameters
        ----------
        has_first_layer
            Whether this rank has it.
        """
        given = self.microbatches
        parts = [(self.inputs, self.targets, self.keywords)] if given is None else given
        several = [Microbatch(*part) for part in parts if isinstance(part, tuple)]
        inputs = [leaf for each in several for leaf in tree_leaves(each.input)]
        others = [leaf for each in several for leaf in tree_leaves((each.target, each.keywords))]
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in others):
            raise InvalidRun(
                "found a target or keyword that requires a gradient. Several ranks may use these, and none "
                "computes their gradients. Detach them, or compute them in a layer or in the loss."
            )
        if not has_first_layer and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in inputs):
            raise InvalidRun(
                "found inputs that require a gradient on a rank without the first layer. Their gradient "
                "arrives only on the rank that has that layer. Pass them only there (inputs if 0 in "
                "pipe.modules else None), detach them on the other ranks, or make the module that computes "
                "them the first layer."
            )

    @property
    def rows(self) -> int:
        """Its rows, if it is split evenly and this rank has inputs or targets; else 0."""
        leaves = (leaf for part in (self.inputs, self.targets) for leaf in tree_leaves(part))
        tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim())
        return next((tensor.shape[0] for tensor in tensors), 0) if self.is_even else 0


def microbatches_of(
    batch: Batch, count: int, tokens: Sequence[int] | None = None, taken: Keywords = _ANY
) -> list[Microbatch]:
    """The microbatches of a batch.

    Parameters
    ----------
    count
        The plan's number of microbatches.
    tokens
        Their numbers of tokens, as the plan states them; None if it does not.
    taken
        The keywords that layers take.

    Raises
    ------
    InvalidRun
        If the batch cannot be split, is given twice, or has a keyword that no layer takes.
    """
    if batch.sequences is not None and batch.cu_seqlens is None:
        raise InvalidRun("found sequences= without cu_seqlens=, the offsets of the sequences. Pass both.")
    if batch.microbatches is not None:
        made = _as_microbatches(batch, batch.microbatches, count)
    elif batch.cu_seqlens is None:
        made = split_batch(batch.inputs, batch.targets, batch.keywords, count)
    else:
        made = split_packed(
            batch.inputs,
            batch.targets,
            batch.keywords,
            batch.cu_seqlens,
            batch.sequences,
            tokens=tokens,
            count=count,
            taken=taken,
        )
    names = {name for each in made for name in each.keywords}
    wrong = sorted(taken.untaken(names)) if names else []
    if wrong:
        raise InvalidRun(
            f"found the keyword {wrong[0]!r}, which no layer takes. Name it in the forward of a layer, or "
            f"leave it out."
        )
    return made


def _as_microbatches(batch: Batch, given: Sequence[Any], count: int) -> list[Microbatch]:
    if replace(batch, microbatches=None).is_given:
        raise InvalidRun(
            "found a batch and microbatches=; pass one of them. Every microbatch has its own input, target "
            "and keywords."
        )
    if len(given) != count:
        raise InvalidRun(
            f"found {len(given)} microbatches; the plan has {count}. Pass {count} microbatches, or plan for "
            f"{len(given)}."
        )
    return [
        tree_map_only(Whole, attrgetter("value"), _as_microbatch(each, at)) for at, each in enumerate(given)
    ]


def split_batch(inputs: Any, targets: Any, keywords: Mapping[str, Any], count: int) -> list[Microbatch]:
    """Split a batch into ``count`` equal microbatches, which are views of it.

    Every tensor is split along its first dimension, wherever it is in nested lists, tuples and dicts.
    Everything else, also tensors without dimensions and values in :class:`Whole`, is passed to every
    microbatch.
    A keyword whose first dimension may be another one than that of the rows becomes :class:`Ambiguous`.

    Raises
    ------
    InvalidRun
        If the tensors have different numbers of rows, or ``count`` does not divide them, or there is another
        container or an array of NumPy.
    """
    leaves, structure = tree_flatten_with_path((inputs, targets, dict(keywords)))
    first: tuple[Any, ...] = ()  # the place of the first tensor
    rows = 0
    for path, leaf in leaves:
        if not isinstance(leaf, Tensor):
            require_no_container(leaf, path)
        elif leaf.dim() and not first:
            first, rows = path, leaf.shape[0]
        elif leaf.dim() and leaf.shape[0] != rows:
            raise InvalidRun(
                f"{name_of(first)} has {rows} rows and {name_of(path)} has {leaf.shape[0]}; the first "
                f"dimension of every tensor must be the batch. Mark what belongs to the whole batch: "
                f"zbv_worker.Whole(tensor)."
            )
    if first and (rows == 0 or rows % count):
        raise InvalidRun(
            f"{name_of(first)} has {rows} rows; must be a multiple of the plan's {count} microbatches. "
            f"Change the batch size, for instance with drop_last=True in the DataLoader, or plan for another "
            f"number of microbatches."
        )
    parts = [
        torch.split(leaf, rows // count)
        if isinstance(leaf, Tensor) and leaf.dim()
        else (leaf.value if isinstance(leaf, Whole) else leaf,) * count
        for _, leaf in leaves
    ]
    is_known = inputs is not None and targets is not None
    names = _ambiguous(leaves, count, is_known=is_known) if keywords and count > 1 else set()
    whole: Mapping[str, Any] = {}
    if names:
        both = zip(leaves, parts, strict=True)
        uncut = [leaf if isinstance(leaf, Tensor) else part[0] for (_, leaf), part in both]
        whole = tree_unflatten(uncut, structure)[_KEYWORDS]
    found = []
    for at in range(count):
        input, target, own = tree_unflatten([part[at] for part in parts], structure)
        for name in names:
            own[name] = Ambiguous(whole[name], own[name])
        found.append(Microbatch(input, target, own))
    return found


def _ambiguous(leaves: Sequence[tuple[tuple[Any, ...], Any]], count: int, *, is_known: bool) -> set[str]:
    """The keywords with a tensor that may belong to the whole batch: its rows are another dimension too.

    That may be a dimension which only layers have. A part with the wrong rows then fails there, but a part
    with a single row fits anything, so the layers decide about it.

    Parameters
    ----------
    leaves
        The places of the batch's tensors and constants, and these.
    count
        The number of microbatches.
    is_known
        Whether there are inputs and targets. If not, the layers know the other dimensions.
    """
    split = [(path, leaf.shape) for path, leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    others = {size for _, shape in split for size in shape[1:]}
    return {
        path[1].key
        for path, shape in split
        if path[0].idx == _KEYWORDS and (shape[0] in {*others, count} or not is_known)
    }


def _as_microbatch(given: Any, at: int) -> Microbatch:
    if isinstance(given, Microbatch):
        return given
    if isinstance(given, tuple) and 1 <= len(given) <= len(Microbatch._fields):
        return Microbatch(*given)
    raise InvalidRun(
        f"microbatches[{at}]: found a {type(given).__name__}; must be a Microbatch, or a tuple of input, "
        f"target and keywords."
    )
