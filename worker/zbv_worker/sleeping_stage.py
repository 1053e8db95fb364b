"""A stage without a model: its actions take as long as the plan says and do nothing.

What comes in is dropped, and what goes out has the right size; so the ranks exchange what a real run
exchanges. Sleeping ranks leave the CPU to others: a few cores carry many of them.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping

import torch
from torch import Tensor

SPIN_NANOSECONDS = 100_000
"""The end of a wait that is spent awake.

Linux wakes a sleeper 80 us late as a rule, 35 us after :func:`sharpen_timer`, and more on a busy core.
"""
_PR_SET_TIMERSLACK = 29

_FLOAT_BYTES = 4


def sharpen_timer() -> bool:
    """Have Linux wake this thread, and those it will start, as soon as it can; returns whether it does.

    By default sleeps are prolonged by up to 50 us, so that several end together.
    """
    try:
        prctl = ctypes.CDLL(None).prctl
    except (AttributeError, OSError, TypeError):  # not Linux
        return False
    return bool(prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0) == 0)


def pause(nanoseconds: int) -> None:
    """Wait for a time, accurately: asleep for most of it, awake towards the end."""
    until = time.perf_counter_ns() + nanoseconds
    if nanoseconds > SPIN_NANOSECONDS:
        time.sleep((nanoseconds - SPIN_NANOSECONDS) / 1e9)
    while time.perf_counter_ns() < until:
        pass


class SleepingStage:
    """A stage whose actions sleep.

    Parameters
    ----------
    nanoseconds
        How long an action takes, by letter.
    output_bytes
        Size of what F returns; None for the last stage, whose F returns a loss.
    gradient_bytes
        Size of what I and B return; None for the first stage, which returns nothing.

    Attributes
    ----------
    cpu_nanoseconds
        What the waits have cost this thread in CPU time so far.
    """

    def __init__(self, nanoseconds: Mapping[str, int], output_bytes: int | None, gradient_bytes: int | None):
        self._nanoseconds = dict(nanoseconds)
        # Sent again and again: nobody writes to it, and its receivers have memory of their own.
        self._output = torch.zeros(()) if output_bytes is None else _tensor(output_bytes)
        self._gradient = None if gradient_bytes is None else _tensor(gradient_bytes)
        self.cpu_nanoseconds = 0

    def forward(self, microbatch: int, input: Tensor, target: Tensor | None = None, *, split: bool) -> Tensor:
        """F."""
        self._take("F")
        return self._output

    def backward(self, microbatch: int, grad_output: Tensor | None) -> Tensor | None:
        """B."""
        self._take("B")
        return self._gradient

    def backward_input(self, microbatch: int, grad_output: Tensor | None) -> Tensor | None:
        """I."""
        self._take("I")
        return self._gradient

    def backward_weight(self, microbatch: int) -> None:
        """W."""
        self._take("W")

    def _take(self, letter: str) -> None:
        before = time.thread_time_ns()
        pause(self._nanoseconds[letter])
        self.cpu_nanoseconds += time.thread_time_ns() - before


class NoBatches:
    """Data for stages that read none."""

    def __init__(self) -> None:
        self._nothing = torch.zeros(())

    def microbatch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        """A scalar as input and as target."""
        return self._nothing, self._nothing


def _tensor(size: int) -> Tensor:
    """A float32 vector of at least ``size`` bytes."""
    return torch.zeros(max(1, -(-size // _FLOAT_BYTES)))
