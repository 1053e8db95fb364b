"""Activation checkpointing that keeps the backward split (Chen et al. 2016, "Training Deep Nets with
Sublinear Memory Cost").

F runs every segment of a stage without a graph and keeps the segment's input. The backward visits the
segments from last to first: it runs a segment again, with a graph, and propagates through it at once, so that
only one segment's activations exist at a time. I adds weight gradients to the queue, for W.

torch.utils.checkpoint would work with I and W too. But it keeps a graph and a random state per segment
between F and I, and it cannot make the loss part of the last segment without the stage's help.

Side effects of a module's forward, such as running statistics, happen twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from ctypes import string_at
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

Segment = Callable[[Tensor], Tensor]
"""A layer, a whole stage, or the last of either with the loss: maps one tensor to one."""

Computing = Callable[[Tensor], AbstractContextManager[object]]
"""The context of an input's forward (autocast)."""

Seed = Callable[[Tensor], Tensor]
"""The initial gradient of an output, if the backward receives none."""


class _Kept(NamedTuple):
    """The state that F keeps of a segment; ``random`` is None if it drew no random numbers."""

    segment: Segment
    input: Tensor
    random: tuple[Tensor, ...] | None


class Recomputed:
    """The segments of one stage and microbatch between F and the backward.

    Parameters
    ----------
    computing
        The context of every forward, first or repeated.
    seed
        Given if the last segment ends in the loss.
    """

    def __init__(self, computing: Computing, seed: Seed | None):
        self._computing = computing
        self._seed = seed
        self._kept: list[_Kept] = []

    def forward(self, segments: Sequence[Segment], x: Tensor) -> Tensor:
        """Run F; returns the last segment's output, without a graph."""
        generators = _generators(x.device)
        with torch.no_grad(), self._computing(x):
            for segment in segments:
                before = _states(generators)
                output = segment(x)
                drew = _differ(before, _states(generators))
                self._kept.append(_Kept(segment, x, before if drew else None))
                x = output
        return x

    def backward(self, gradient: Tensor | None, *, needs_input_grad: bool) -> Tensor | None:
        """Run I or B: repeat every segment and propagate; returns the gradient of the first segment's input.

        Parameters
        ----------
        gradient
            The gradient of the output; None if the output is the loss.
        needs_input_grad
            Whether the result is needed; otherwise it is None.
        """
        while self._kept:
            kept = self._kept.pop()
            # All inputs but the first come from a segment that may have parameters.
            needs_grad = kept.input.is_floating_point() and (bool(self._kept) or needs_input_grad)
            gradient = self._through(kept, gradient, needs_grad=needs_grad)
        return gradient

    def _through(self, kept: _Kept, gradient: Tensor | None, *, needs_grad: bool) -> Tensor | None:
        x = kept.input.detach().requires_grad_(needs_grad)
        edge = None
        with torch.enable_grad(), _drawing_again(kept.random, x.device), self._computing(x):
            output = kept.segment(x)
        if gradient is None and self._seed is not None:
            gradient = self._seed(output)
        if output.requires_grad:
            edge = get_gradient_edge(output)
        # The output's values are not needed, unless the graph saved them.
        del output
        if edge is not None:
            torch.autograd.backward(edge, gradient)
        if not needs_grad:
            return None
        found, x.grad = x.grad, None
        return torch.zeros_like(x) if found is None else found


def _generators(device: torch.device) -> tuple[torch.Generator, ...]:
    """The generators that modules draw from by default."""
    if device.type != "cuda":
        return (torch.default_generator,)
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.default_generator, torch.cuda.default_generators[index]


def _states(generators: Sequence[torch.Generator]) -> tuple[Tensor, ...]:
    return tuple(generator.get_state() for generator in generators)


def _differ(before: Sequence[Tensor], after: Sequence[Tensor]) -> bool:
    return any(_bytes(a) != _bytes(b) for a, b in zip(before, after, strict=True))


def _bytes(state: Tensor) -> bytes:
    # Not by an operator, which dispatch modes would intercept (FLOP counters, fake tensors).
    return string_at(state.data_ptr(), state.nbytes)


@contextmanager
def _drawing_again(random: tuple[Tensor, ...] | None, device: torch.device) -> Iterator[None]:
    """A context that repeats the random numbers of F; restores the generators afterwards."""
    if random is None:
        yield
        return
    generators = _generators(device)
    now = _states(generators)
    try:
        for generator, state in zip(generators, random, strict=True):
            generator.set_state(state)
        yield
    finally:
        for generator, state in zip(generators, now, strict=True):
            generator.set_state(state)
