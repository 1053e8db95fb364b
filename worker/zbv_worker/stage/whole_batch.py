"""Keywords that may belong to the whole batch or to its rows, told apart by what the layers do with them.

A mask (b, l) has one row per sample, a causal mask (l, l) is for all of them. If b = l, shapes cannot tell.
So the layer runs on tensors without values: with a number of rows that no tensor has, only one of the two
fits.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from zbv_worker.errors import InvalidRun
from zbv_worker.stage.loss import AuxiliaryLosses, Running
from zbv_worker.values.structure import map_tensors, tensors_of

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""The attributes of modules that hold hooks."""


class Ambiguous(NamedTuple):
    """A keyword of a microbatch. A named tuple, so that it can be sent to other ranks."""

    whole: Any
    part: Any
    """The same value with the whole of its ambiguous tensors, and with the microbatch's rows of them.
    Other tensors are equal in both."""


class Decisions:
    """For one layer, which tensors of its ambiguous keywords belong to the whole batch.

    Parameters
    ----------
    per_row
        Keywords that are known to have one row per sample.
    """

    def __init__(self, layer: nn.Module, per_row: Collection[str] = ()):
        self._name = type(layer).__name__
        self._per_row = per_row
        self._known: dict[tuple[str, ...], tuple[bool, ...]] = {}

    def applied(
        self, layer: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The keywords of a call without ambiguous ones.

        Raises
        ------
        InvalidRun
            If the layer fits neither.
        """
        names = tuple(name for name, value in keywords.items() if type(value) is Ambiguous)
        plain = {
            name: value.part if type(value) is Ambiguous and name in self._per_row else value
            for name, value in keywords.items()
        }
        if all(name in self._per_row for name in names):
            return plain
        leaves = _leaves(plain)
        sizes = {size for tensor in tensors_of(arguments) for size in tensor.shape[1:]}
        sizes |= {size for whole, _ in leaves for size in whole.shape[1:]}
        if any(len(part) == 1 for _, part in leaves):  # would fit what the layer computes inside, too
            sizes |= {size for parameter in layer.parameters() for size in parameter.shape}
        if not any(whole.shape[0] in sizes for whole, _ in leaves):
            return _chosen(plain, (False,) * len(leaves))
        choice = self._known.get(names)
        if choice is None:
            choice = self._known[names] = self._decide(layer, arguments, plain)
        return _chosen(plain, choice)

    def _decide(
        self, layer: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> tuple[bool, ...]:
        leaves = _leaves(keywords)
        rows, other = leaves[0][1].shape[0], _unused_size([arguments, keywords])
        error: Exception | None = None
        # Whole values first: they are what the unsplit model has, if the rows do not matter to the layer.
        for choice in product((True, False), repeat=len(leaves)):
            try:
                if _fits(layer, arguments, keywords, choice, rows, other):
                    return choice
            except Exception as raised:  # a layer raises anything if a shape does not fit
                error = raised
        names = [name for name, value in keywords.items() if type(value) is Ambiguous]
        shapes = [list(whole.shape) for whole, _ in leaves]
        reason = (
            "" if error is None else f" ({type(error).__name__}: {str(error).partition(chr(10))[0][:200]})"
        )
        raise InvalidRun(
            f"found the keyword {names[0]!r} of shape {shapes[0]}: its first dimension may be the rows of "
            f"the batch or another one, and a {self._name} runs without values with neither{reason}. Pass "
            f"{names[0]}=zbv_worker.Whole(value) if it belongs to the whole batch, or "
            f"step(microbatches=[Microbatch(input, target, keywords), …]) if it has a row per sample."
        )


def _chosen(keywords: Mapping[str, Any], choice: Sequence[bool]) -> dict[str, Any]:
    """Keywords with the whole or the part of each ambiguous tensor."""
    choices, found = iter(choice), {}
    for name, value in keywords.items():
        if type(value) is Ambiguous:
            wholes, structure = tree_flatten(value.whole)
            parts, _ = tree_flatten(value.part)
            value = tree_unflatten(
                [
                    (whole if next(choices) else part) if _differ(whole, part) else part
                    for whole, part in zip(wholes, parts, strict=True)
                ],
                structure,
            )
        found[name] = value
    return found


def _leaves(keywords: Mapping[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """The ambiguous tensors: whole and part of each."""
    found = []
    for value in keywords.values():
        if type(value) is Ambiguous:
            pairs = zip(tree_flatten(value.whole)[0], tree_flatten(value.part)[0], strict=True)
            found += [pair for pair in pairs if _differ(*pair)]
    return found


def _differ(whole: Any, part: Any) -> bool:
    return isinstance(whole, Tensor) and whole.shape != part.shape


def _unused_size(values: Any) -> int:
    """A prime that is larger than every dimension."""
    size = 1 + max((size for tensor in tensors_of(values) for size in tensor.shape), default=1)
    while any(size % factor == 0 for factor in range(2, int(size**0.5) + 1)):
        size += 1
    return size


def _fits(
    layer: nn.Module,
    arguments: tuple[Any, ...],
    keywords: Mapping[str, Any],
    choice: Sequence[bool],
    rows: int,
    other: int,
) -> bool:
    """Whether a layer gives ``other`` rows for ``other`` rows, where the microbatch has ``rows``."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    known: dict[int, Tensor] = {}

    has_rows = any(tensor.shape[:1] == (rows,) for tensor in tensors_of(arguments))

    def resized(tensor: Tensor) -> Tensor:
        size = tensor.shape[0] if tensor.dim() else 0
        # A layer may have flattened rows and tokens.
        is_split = size == rows if has_rows else size and size % rows == 0
        return made(tensor, [size // rows * other, *tensor.shape[1:]] if is_split else tensor.shape)

    def of_keyword(tensor: Tensor) -> Tensor:
        is_split = tensor.shape[:1] == (rows,) and id(tensor) not in wholes
        return made(tensor, [other, *tensor.shape[1:]] if is_split else tensor.shape)

    def made(tensor: Tensor, shape: Sequence[int]) -> Tensor:
        return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)

    wholes = {id(pair[0]) for pair, is_whole in zip(_leaves(keywords), choice, strict=True) if is_whole}
    with _without_effects(layer), torch.no_grad(), mode:
        for tensor in [*layer.parameters(), *layer.buffers()]:
            known[id(tensor)] = torch.empty_like(tensor)
        given = map_tensors(resized, arguments)
        more = map_tensors(of_keyword, _chosen(keywords, choice))
        values = {name: known[id(tensor)] for name, tensor in layer.named_parameters()}
        values |= {name: known[id(tensor)] for name, tensor in layer.named_buffers()}
        output = torch.func.functional_call(layer, values, given, more)
    found = [tensor for tensor in tensors_of(output) if tensor.dim()]
    return bool(found) and all(tensor.shape[0] % other == 0 for tensor in found)


@contextmanager
def _without_effects(layer: nn.Module) -> Iterator[None]:
    """A context in which a layer runs without hooks and auxiliary losses; restores its attributes."""
    before = [(module, {**vars(module)}, {**module._buffers}) for module in layer.modules()]
    for module, *_ in before:
        vars(module).update({name: {} for name in HOOKS})
    try:
        with (
            unlogged(),
            torch.random.fork_rng(devices=[]),
            Running(AuxiliaryLosses(is_weighted=False), "evaluation"),
        ):
            yield
    finally:
        for module, attributes, buffers in before:
            module._buffers.clear()
            module._buffers.update(buffers)
            vars(module).clear()
            vars(module).update(attributes)


@contextmanager
def unlogged() -> Iterator[None]:
    """Silence torch's log of operators that fail on tensors without values; the exception is handled."""
    logger = logging.getLogger(FakeTensorMode.__module__)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
