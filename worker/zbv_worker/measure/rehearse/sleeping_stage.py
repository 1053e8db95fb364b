"""A stage without a model: its actions take as long as the plan says and do nothing.

What comes in is dropped, and what goes out has the right size; so the ranks exchange what a real run
exchanges. Sleeping ranks leave the CPU to others: a few cores carry many of them.
"""

from __future__ import annotations

import ctypes
import resource
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

SPIN_NANOSECONDS = 100_000
"""The end of a wait that is spent awake.

Linux wakes a sleeper 80 us late as a rule, 35 us after :func:`sharpen_timer`, and more on a busy core.
"""
NO_WAIT_NANOSECONDS = 30_000
"""A thread that was off its CPU for less has not waited for a tensor: being woken takes about as long."""

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


def times_blocked() -> int:
    """How often this thread has given its CPU up by itself; where the system does not count, always more."""
    who = getattr(resource, "RUSAGE_THREAD", None)  # Linux
    return time.perf_counter_ns() if who is None else resource.getrusage(who).ru_nvcsw


def pause_until(due: int) -> None:
    """Wait for a time of the monotonic clock, in ns: asleep for most of it, awake towards the end."""
    remaining = due - time.perf_counter_ns()
    if remaining > SPIN_NANOSECONDS:
        time.sleep((remaining - SPIN_NANOSECONDS) / 1e9)
    while time.perf_counter_ns() < due:
        pass


class SleepingDevice:
    """What a rank pretends to compute on; its stages share it.

    It keeps time like a device that its host queues work for ahead. An action whose input was there in time
    begins when the one before was *due* to end: neither that a sleep ended late, nor what the executor did
    in between, delays it, as long as the action before was long enough to hide that. An action that had to
    wait for its input begins when the wait was over. So what the host costs is not charged to every action,
    and transfers take what they take: they are sent, received and waited for at real times.

    Whether the executor has waited, the system tells: its thread gave its CPU up, and used none for a while.
    A thread that was merely pushed aside, because many ranks share a few cores, has not waited.

    Attributes
    ----------
    cpu_nanoseconds
        What pretending has cost this thread in CPU time so far.
    """

    def __init__(
        self,
        clock: Callable[[], int] = time.perf_counter_ns,
        cpu_clock: Callable[[], int] = time.thread_time_ns,
        count_blocks: Callable[[], int] = times_blocked,
        pause_until: Callable[[int], None] = pause_until,
    ):
        self._clock, self._cpu_clock, self._pause_until = clock, cpu_clock, pause_until
        self._count_blocks = count_blocks
        self._due = self._length = 0
        self._ended, self._cpu_ended, self._blocked = clock(), cpu_clock(), count_blocks()
        self.cpu_nanoseconds = 0

    def take(self, nanoseconds: int) -> None:
        """Let an action take its time."""
        now, cpu = self._clock(), self._cpu_clock()
        off_cpu = (now - self._ended) - (cpu - self._cpu_ended)
        waited = off_cpu > NO_WAIT_NANOSECONDS and self._count_blocks() != self._blocked
        begin = now if waited else max(self._due, now - self._length)
        self._due, self._length = begin + nanoseconds, nanoseconds
        self._pause_until(self._due)
        self._blocked = self._count_blocks()
        self._ended, self._cpu_ended = self._clock(), self._cpu_clock()
        self.cpu_nanoseconds += self._cpu_ended - cpu


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
    device
        What it pretends to compute on: the same for all stages of a rank.
    """

    def __init__(
        self,
        nanoseconds: Mapping[str, int],
        output_bytes: int | None,
        gradient_bytes: int | None,
        device: SleepingDevice,
    ):
        self._nanoseconds = dict(nanoseconds)
        # Sent again and again: nobody writes to it, and its receivers have memory of their own.
        self._output = torch.zeros(()) if output_bytes is None else _tensor(output_bytes)
        self._gradient = None if gradient_bytes is None else _tensor(gradient_bytes)
        self._device = device

    def forward(self, microbatch: int, input: Tensor, target: Tensor | None = None, *, split: bool) -> Tensor:
        """F."""
        self._device.take(self._nanoseconds["F"])
        return self._output

    def backward(self, microbatch: int, grad_output: Tensor | None) -> Tensor | None:
        """B."""
        self._device.take(self._nanoseconds["B"])
        return self._gradient

    def backward_input(self, microbatch: int, grad_output: Tensor | None) -> Tensor | None:
        """I."""
        self._device.take(self._nanoseconds["I"])
        return self._gradient

    def backward_weight(self, microbatch: int) -> None:
        """W."""
        self._device.take(self._nanoseconds["W"])


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
