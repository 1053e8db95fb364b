"""A stage without a model: its actions take the planned time and compute nothing.

Inputs are dropped, and outputs have the right size, so that the ranks exchange what a real run exchanges.
Sleeping ranks use little CPU time: a few cores can run many of them.
"""

from __future__ import annotations

import ctypes
import resource
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

SPIN_NANOSECONDS = 100_000
"""The end of a wait, spent in a busy loop.

Linux usually wakes a sleeper 80 us late, 35 us after :func:`sharpen_timer`, and more on a busy core.
"""
NO_WAIT_NANOSECONDS = 30_000
"""A thread that was off its CPU for less did not wait for a tensor: waking up takes about as long."""

_PR_SET_TIMERSLACK = 29

_FLOAT_BYTES = 4


def sharpen_timer() -> bool:
    """Make Linux wake this thread, and threads that it starts, as precisely as possible.

    Returns whether it does. By default sleeps may take up to 50 us longer, so that several end together.
    """
    try:
        prctl = ctypes.CDLL(None).prctl
    except (AttributeError, OSError, TypeError):  # not Linux
        return False
    return bool(prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0) == 0)


def times_blocked() -> int:
    """How often this thread has blocked; if the system does not count that, a number that always grows."""
    who = getattr(resource, "RUSAGE_THREAD", None)  # Linux
    return time.perf_counter_ns() if who is None else resource.getrusage(who).ru_nvcsw


def pause_until(due: int) -> None:
    """Wait for a time of the monotonic clock, in ns: mostly asleep, at the end in a busy loop."""
    remaining = due - time.perf_counter_ns()
    if remaining > SPIN_NANOSECONDS:
        time.sleep((remaining - SPIN_NANOSECONDS) / 1e9)
    while time.perf_counter_ns() < due:
        pass


class SleepingDevice:
    """A simulated device, shared by the stages of a rank.

    It keeps time like a device for which the host queues work ahead. An action whose input arrived in time
    begins when the one before was *due* to end: neither a sleep that ended late nor the executor's work in
    between delays it, if the previous action was long enough to hide that. An action that waited for its
    input begins when the wait was over. So actions do not include the host's overhead, and transfers take
    their real time.

    The operating system shows whether the executor has waited: its thread blocked, and used no CPU time for a
    while. A thread that was only preempted, because many ranks share a few cores, has not waited.

    Attributes
    ----------
    cpu_nanoseconds
        This thread's CPU time in the simulation so far.
    instead
        The times of the next actions, in ns, in place of those that they state; 0 for nothing.
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
        self.instead: list[int] = []

    def take(self, nanoseconds: int, arrival: int | None = None) -> int:
        """Let an action take its time, after the arrival of its input if that is known.

        Returns when the action is due to end.
        """
        if self.instead:
            nanoseconds = self.instead.pop(0)
            if not nanoseconds:
                return self._due
        now, cpu = self._clock(), self._cpu_clock()
        off_cpu = (now - self._ended) - (cpu - self._cpu_ended)
        waited = off_cpu > NO_WAIT_NANOSECONDS and self._count_blocks() != self._blocked
        begin = now if waited else max(self._due, now - self._length)
        begin = begin if arrival is None else max(begin, arrival)
        self._due, self._length = begin + nanoseconds, nanoseconds
        self._pause_until(self._due)
        self._blocked = self._count_blocks()
        self._ended, self._cpu_ended = self._clock(), self._cpu_clock()
        self.cpu_nanoseconds += self._cpu_ended - cpu
        return self._due


class SleepingStage:
    """A stage whose actions sleep.

    Parameters
    ----------
    nanoseconds
        The durations of actions, by letter and microbatch.
    output_bytes
        Size of F's output; None for the last stage, whose F returns a loss.
    gradient_bytes
        Size of the gradient from I and B; None for the first stage, which returns none.
    device
        The simulated device, shared by all stages of a rank.
    """

    def __init__(
        self,
        nanoseconds: Mapping[str, Sequence[int]],
        output_bytes: int | None,
        gradient_bytes: int | None,
        device: SleepingDevice,
    ):
        self._nanoseconds = dict(nanoseconds)
        # Sent repeatedly: nothing writes to it, and receivers have their own memory.
        self._output = torch.zeros(()) if output_bytes is None else _tensor(output_bytes)
        self._gradient = None if gradient_bytes is None else _tensor(gradient_bytes)
        self._device = device

    def forward(self, microbatch: int, input: Tensor, target: Tensor | None = None, *, split: bool) -> Tensor:
        """Sleep for F."""
        self._device.take(self._nanoseconds["F"][microbatch])
        return self._output

    def backward(self, microbatch: int, grad_output: Tensor | None) -> Tensor | None:
        """Sleep for B."""
        self._device.take(self._nanoseconds["B"][microbatch])
        return self._gradient

    def backward_input(self, microbatch: int, grad_output: Tensor | None) -> Tensor | None:
        """Sleep for I."""
        self._device.take(self._nanoseconds["I"][microbatch])
        return self._gradient

    def backward_weight(self, microbatch: int) -> None:
        """Sleep for W."""
        self._device.take(self._nanoseconds["W"][microbatch])


class NoBatches:
    """Data for stages that read none."""

    def __init__(self) -> None:
        self._nothing = torch.zeros(())

    def microbatch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        """A scalar as input and target."""
        return self._nothing, self._nothing


def _tensor(size: int) -> Tensor:
    """A float32 vector of at least ``size`` bytes."""
    return torch.zeros(max(1, -(-size // _FLOAT_BYTES)))
