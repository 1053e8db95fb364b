"""Splits a packed batch into microbatches: sequences of different lengths, one after the other, no padding.

The names are those of FlashAttention's functions for variable lengths: ``cu_seqlens`` has the offsets of the
sequences, and ``max_seqlen`` the length of the longest one. ``position_ids`` are those of transformers'
``DataCollatorWithFlattening``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

from zbv_worker.errors import InvalidRun
from zbv_worker.model.protocol import Microbatch, Whole
from zbv_worker.stage.layers import Keywords

OF_SEQUENCES = ("cu_seqlens", "max_seqlen", "position_ids")
"""The keywords with which layers learn where sequences begin."""


def split_packed(
    inputs: Any,
    targets: Any,
    keywords: Mapping[str, Any],
    cu_seqlens: Any,
    sequences: Sequence[Sequence[int]] | None,
    *,
    tokens: Sequence[int] | None,
    count: int,
    taken: Keywords,
) -> list[Microbatch]:
    """Split a packed batch into ``count`` microbatches, each with some of its sequences.

    Tensors of the batch have one row per token, or are (1, tokens, …). All others are passed to every
    microbatch if they have no dimensions, and refused if they have. Layers that name them get the keywords of
    :data:`OF_SEQUENCES`, for the microbatch's own sequences: ``cu_seqlens`` of dtype int32 and
    ``position_ids`` of shape (1, tokens), on the CPU, and ``max_seqlen``, a number.

    Parameters
    ----------
    cu_seqlens
        The offsets of the n sequences: n + 1 ascending integers, from 0 to the number of tokens.
    sequences
        For every microbatch, the indices of its sequences. By default the batch has the sequences of
        microbatch 0 first, then those of microbatch 1, and so on, with as many tokens as the plan states.
    tokens
        The tokens of every microbatch as the plan states them; None if it does not.
    taken
        The keywords that layers of the whole model take.

    Raises
    ------
    InvalidRun
        If these do not fit together, or no layer takes a keyword about sequences.
    """
    offsets = _offsets(cu_seqlens)
    chosen = _by_tokens(offsets, tokens, count) if sequences is None else _checked(sequences, offsets, count)
    names = taken.beyond_first | ({"cu_seqlens", "max_seqlen"} if taken.takes_any else set())
    given = [name for name in OF_SEQUENCES if name in names]
    if not given:
        raise InvalidRun(
            "found cu_seqlens, and no layer takes cu_seqlens, max_seqlen or position_ids. Layers that "
            "compute attention need one of them, or they would mix sequences: name it in their forward. For "
            "a model without attention, pass the microbatches: step(microbatches=[(input, target), …])."
        )
    leaves, structure = tree_flatten_with_path((inputs, targets, dict(keywords)))
    for path, leaf in leaves:
        require_no_container(leaf, path)
    dimensions = [_token_dimension(leaf, path, offsets[-1]) for path, leaf in leaves]
    made = []
    for own in chosen:
        spans = _joined([(offsets[at], offsets[at + 1]) for at in own])
        parts = [
            (leaf.value if isinstance(leaf, Whole) else leaf)
            if dimension is None
            else _cut(leaf, spans, dimension)
            for (_, leaf), dimension in zip(leaves, dimensions, strict=True)
        ]
        input, target, more = tree_unflatten(parts, structure)
        lengths = [offsets[at + 1] - offsets[at] for at in own]
        made.append(Microbatch(input, target, _of_sequences(lengths, given) | more))
    return made


def lengths_of(cu_seqlens: Any, sequences: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """The lengths of every microbatch's sequences; parameters and errors as of :func:`split_packed`."""
    offsets = _offsets(cu_seqlens)
    chosen = _checked(sequences, offsets, count)
    return [[offsets[at + 1] - offsets[at] for at in own] for own in chosen]


def _offsets(cu_seqlens: Any) -> list[int]:
    found = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens
    valid = (
        isinstance(found, list | tuple)
        and len(found) > 1
        and all(type(each) is int for each in found)
        and found[0] == 0
        and all(first < second for first, second in pairwise(found))
    )
    if not valid:
        shown = str(found)
        raise InvalidRun(
            f"cu_seqlens: found {shown[:60]}{'…' if len(shown) > 60 else ''}; must be the offsets of the "
            f"sequences, ascending integers from 0 to the number of tokens: [0, 5, 7] for two sequences of 5 "
            f"and 2 tokens."
        )
    return list(found)


def _by_tokens(offsets: Sequence[int], tokens: Sequence[int] | None, count: int) -> list[list[int]]:
    """Consecutive sequences for every microbatch, with the tokens that the plan states."""
    if tokens is None:
        raise InvalidRun(
            f"found cu_seqlens without sequences=. Pass for each of the plan's {count} microbatches the "
            f"indices of its sequences, as [[0, 3], [1], …], or plan with the feature tokens."
        )
    place = {offset: index for index, offset in enumerate(offsets)}
    ends = [*accumulate(tokens)]
    wrong = next((at for at, end in enumerate(ends) if end not in place), None)
    if wrong is None and ends[-1] != offsets[-1]:
        found = f"the batch has {offsets[-1]} tokens, but the plan's feature tokens adds up to {ends[-1]}"
    elif wrong is not None:
        found = f"no sequence ends at token {ends[wrong]}, where microbatch {wrong} of the plan ends"
    else:
        bounds = [0, *(place[end] for end in ends)]
        return [list(range(first, end)) for first, end in pairwise(bounds)]
    raise InvalidRun(
        f"cu_seqlens: {found}. Pass the sequences in the order of the plan's microbatches, or pass "
        f"sequences=."
    )


def _checked(
    sequences: Sequence[Sequence[int]], offsets: Sequence[int], count: int
) -> Sequence[Sequence[int]]:
    if len(sequences) != count:
        raise InvalidRun(
            f"sequences: found {len(sequences)} microbatches; the plan has {count}. Pass one list of indices "
            f"for each."
        )
    every = [index for own in sequences for index in own]
    if sorted(every) != list(range(len(offsets) - 1)) or not all(sequences):
        raise InvalidRun(
            f"sequences: found {len(every)} indices for {len(offsets) - 1} sequences; every sequence must be "
            f"in exactly one microbatch, and no microbatch may be empty."
        )
    return sequences


def _token_dimension(leaf: object, path: tuple[Any, ...], tokens: int) -> int | None:
    """The dimension of a tensor that has its tokens; None for what is passed to every microbatch."""
    if not isinstance(leaf, Tensor) or leaf.dim() == 0:
        return None
    for dimension in (0, 1):
        if leaf.dim() > dimension and leaf.shape[dimension] == tokens and leaf.shape[:dimension].numel() == 1:
            return dimension
    raise InvalidRun(
        f"{name_of(path)} has the shape {list(leaf.shape)}; by cu_seqlens the batch has {tokens} tokens, so "
        f"it must be [{tokens}, …] or [1, {tokens}, …]. Mark what belongs to the whole batch: "
        f"zbv_worker.Whole(tensor)."
    )


def _joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same spans, neighbours as one."""
    joined = [spans[0]]
    for begin, end in spans[1:]:
        if begin == joined[-1][1]:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return joined


def _cut(tensor: Tensor, spans: Sequence[tuple[int, int]], dimension: int) -> Tensor:
    """Some tokens of a tensor; a view if they are neighbours."""
    parts = [tensor.narrow(dimension, begin, end - begin) for begin, end in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dimension)


def _of_sequences(lengths: Sequence[int], names: Sequence[str]) -> dict[str, Any]:
    """The keywords about a microbatch's sequences."""
    made: dict[str, Callable[[], Any]] = {
        "cu_seqlens": partial(torch.tensor, [0, *accumulate(lengths)], dtype=torch.int32),
        "max_seqlen": partial(max, lengths),
        "position_ids": lambda: torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0),
    }
    return {name: made[name]() for name in names}


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
