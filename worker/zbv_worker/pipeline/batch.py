"""Splits a batch into a plan's microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

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


@dataclass(frozen=True)
class Batch:
    """What a call of ``step`` or ``evaluate`` was given; see :meth:`zbv_worker.Pipeline.step`."""

    inputs: Any
    targets: Any
    keywords: Mapping[str, Any]
    microbatches: Sequence[Any] | None
    cu_seqlens: Tensor | Sequence[int] | None = None
    sequences: Sequence[Sequence[int]] | None = None

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
        if any(_requires_grad((each.target, each.keywords)) for each in several):
            raise InvalidRun(
                "found a target or keyword that requires a gradient. Several ranks may use these, and none "
                "computes their gradients. Detach them, or compute them in a layer or in the loss."
            )
        if not has_first_layer and any(_requires_grad(each.input) for each in several):
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

    @property
    def is_even(self) -> bool:
        """Whether it is split into microbatches of equal shapes."""
        return self.microbatches is None and self.cu_seqlens is None


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
    found = _cut(batch, count, tokens, taken)
    wrong = sorted({name for each in found for name in taken.untaken(each.keywords)})
    if wrong:
        raise InvalidRun(
            f"found the keyword {wrong[0]!r}, which no layer takes. Name it in the forward of a layer, or "
            f"leave it out."
        )
    return found


def _cut(batch: Batch, count: int, tokens: Sequence[int] | None, taken: Keywords) -> list[Microbatch]:
    if batch.sequences is not None and batch.cu_seqlens is None:
        raise InvalidRun("found sequences= without cu_seqlens=, the offsets of the sequences. Pass both.")
    given = batch.microbatches
    if given is None and batch.cu_seqlens is None:
        return split_batch(batch.inputs, batch.targets, batch.keywords, count)
    if given is None:
        return split_packed(
            batch.inputs,
            batch.targets,
            batch.keywords,
            batch.cu_seqlens,
            batch.sequences,
            tokens=tokens,
            count=count,
            taken=taken,
        )
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
    for path, leaf in leaves:
        require_no_container(leaf, path)
    _check_rows({name_of(path): leaf.shape[0] for path, leaf in leaves if _is_split(leaf)}, count)
    parts = [
        leaf.split(leaf.shape[0] // count)
        if _is_split(leaf)
        else (leaf.value if isinstance(leaf, Whole) else leaf,) * count
        for _, leaf in leaves
    ]
    is_known = inputs is not None and targets is not None
    names = _ambiguous(leaves, count, is_known=is_known) if count > 1 else set()
    whole: Mapping[str, Any] = {}
    if names:
        uncut = [leaf if _is_split(leaf) else part[0] for (_, leaf), part in zip(leaves, parts, strict=True)]
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
    others = {size for _, leaf in leaves if _is_split(leaf) for size in leaf.shape[1:]}
    return {
        path[1].key
        for path, leaf in leaves
        if path[0].idx == _KEYWORDS
        if _is_split(leaf) and (leaf.shape[0] in {*others, count} or not is_known)
    }


def _check_rows(rows: Mapping[str, int], count: int) -> None:
    """Check the number of rows of every tensor, by name."""
    if not rows:
        return
    first, expected = next(iter(rows.items()))
    for name, found in rows.items():
        if found != expected:
            raise InvalidRun(
                f"{first} has {expected} rows and {name} has {found}; the first dimension of every tensor "
                f"must be the batch. Mark what belongs to the whole batch: zbv_worker.Whole(tensor)."
            )
    if expected == 0 or expected % count:
        raise InvalidRun(
            f"{first} has {expected} rows; must be a multiple of the plan's {count} microbatches. Change the "
            f"batch size, for instance with drop_last=True in the DataLoader, or plan for another number of "
            f"microbatches."
        )


def _requires_grad(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(value))


def _is_split(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def _as_microbatch(given: Any, at: int) -> Microbatch:
    if isinstance(given, Microbatch):
        return given
    if isinstance(given, tuple) and 1 <= len(given) <= len(Microbatch._fields):
        return Microbatch(*given)
    raise InvalidRun(
        f"microbatches[{at}]: found a {type(given).__name__}; must be a Microbatch, or a tuple of input, "
        f"target and keywords."
    )
