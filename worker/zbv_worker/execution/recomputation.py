"""Activation checkpointing that keeps the split of the backward (Chen et al. 2016, "Training Deep Nets with
Sublinear Memory Cost").

F runs every segment of a stage without a graph and keeps the segment's input. The backward takes the segments
from the last to the first: it runs one again, with a graph, and propagates through it at once, so that the
activations of one segment exist at a time. Weight gradients go where the stage's recorder sends them: in I to
the queue, for W.

torch.utils.checkpoint would do for I and W, too. It keeps a graph and a random state per segment between F
and I, though, and it cannot take the loss of the last stage into the last segment without the stage's help.

What is done twice then: whatever a module does in forward beside its output, as running statistics.
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
"""A layer, a whole stage, or the last of either with the loss: one tensor to one."""

Computing = Callable[[Tensor], AbstractContextManager[object]]
"""The context that a forward of an input runs in (autocast)."""

Seed = Callable[[Tensor], Tensor]
"""The gradient that the backward of an output begins with, where none is received."""


class _Kept(NamedTuple):
    """What F leaves of a segment; ``random`` is None where it drew no random number."""

    segment: Segment
    input: Tensor
    random: tuple[Tensor, ...] | None


class Recomputed:
    """The segments of a stage and microbatch between F and its backward.

    Parameters
    ----------
    computing
        Of every forward, now and again.
    seed
        Where the last segment ends in the loss.
    """

    def __init__(self, computing: Computing, seed: Seed | None):
        self._computing = computing
        self._seed = seed
        self._kept: list[_Kept] = []

    def forward(self, segments: Sequence[Segment], x: Tensor) -> Tensor:
        """F: the last segment's output, of which nothing refers to a graph."""
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
        """I or B: run every segment again and propagate; the gradient of the first one's input.

        Parameters
        ----------
        gradient
            Of the output; None where that is the loss.
        needs_input_grad
            Whether anybody asks for the result; else it is None.
        """
        while self._kept:
            kept = self._kept.pop()
            # Any input but the first was computed by a segment that may have parameters.
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
        # Its values are needed no more, unless the graph saved them.
        del output
        if edge is not None:
            torch.autograd.backward(edge, gradient)
        if not needs_grad:
            return None
        found, x.grad = x.grad, None
        return torch.zeros_like(x) if found is None else found


def _generators(device: torch.device) -> tuple[torch.Generator, ...]:
    """Those that modules draw from by default."""
    if device.type != "cuda":
        return (torch.default_generator,)
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.default_generator, torch.cuda.default_generators[index]


def _states(generators: Sequence[torch.Generator]) -> tuple[Tensor, ...]:
    return tuple(generator.get_state() for generator in generators)


def _differ(before: Sequence[Tensor], after: Sequence[Tensor]) -> bool:
    return any(_bytes(a) != _bytes(b) for a, b in zip(before, after, strict=True))


def _bytes(state: Tensor) -> bytes:
    # Not by an operator: whoever watches operators, or has them compute nothing, would come between.
    return string_at(state.data_ptr(), state.nbytes)


@contextmanager
def _drawing_again(random: tuple[Tensor, ...] | None, device: torch.device) -> Iterator[None]:
    """Within it the random numbers of F come again; afterwards those that would have come."""
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
