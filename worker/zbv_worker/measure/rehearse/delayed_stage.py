"""Stages whose durations vary from step to step by a model of jitter (:mod:`zbv_solver.problem.jitter`).

In step k every rank draws the factors of iteration k of the first chain, as
:func:`~zbv_solver.timing.step_times.rehearsed_times` does. So actions sleep exactly the simulated durations.
Every tensor carries the time at which its producer ended, and the action that takes it begins no earlier than
the drawn latency after that time. A real transfer that takes longer than that delays the action further.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from zbv_solver.errors import InvalidInput
from zbv_solver.problem.jitter import Jitter, draw, drawn_costs, jitter_json
from zbv_solver.problem.problem import LETTERS

from zbv_worker.errors import InvalidRun
from zbv_worker.execution.timeline import HostTimeline, Record
from zbv_worker.execution.whole_plan import WholePlan
from zbv_worker.measure.rehearse.sleeping_stage import SleepingDevice
from zbv_worker.tracing.clocks import Clock, Offset

_FLOATS_OF_STAMP = 2
"""A time is an int64, and tensors between ranks are float32."""


@dataclass(frozen=True)
class Delays:
    """By how much the durations of a rehearsal vary, and the seed of the draws."""

    jitter: Jitter
    seed: int = 0

    @property
    def identity(self) -> tuple[tuple[str, str], ...]:
        """What all ranks must agree on."""
        text = json.dumps(jitter_json(self.jitter))
        return ("jitter", hashlib.sha256(text.encode()).hexdigest()[:12]), ("seed", str(self.seed))

    def require_ranks(self, plan: WholePlan) -> None:
        """Raise :class:`InvalidRun` if the jitter is for another number of ranks than the plan."""
        try:
            self.jitter.require_ranks(plan.problem.pp_degree)
        except InvalidInput as error:
            raise InvalidRun(f"--jitter: {error}") from None

    def simulated(self, plan: WholePlan, scale: float, steps: int) -> NDArray[np.float64]:
        """The lengths (steps,) in seconds of a rehearsal's first steps, without any overhead.

        Raises
        ------
        InvalidRun
            If the jitter is for another number of ranks, or the package that simulates is not installed.
        """
        self.require_ranks(plan)
        try:
            from zbv_solver.timing.step_times import rehearsed_times
        except ModuleNotFoundError as error:
            raise InvalidRun(
                f"--jitter: the simulation needs {error.name}, which is not installed. Install zbv[solver]."
            ) from error
        times = rehearsed_times(plan.problem, plan.orders, self.jitter, iterations=steps, seed=self.seed)
        return scale * (times.span if plan.problem.objective == "span" else times.makespan)


class DrawnTimes:
    """A rank's durations and latencies in the current step, in nanoseconds.

    Parameters
    ----------
    scale
        Seconds per time unit of the plan.
    steps
        Number of steps, which are drawn in advance: a draw during a step would delay it.

    Attributes
    ----------
    begun
        When the rank's actions began, in the order of their execution.
    """

    def __init__(self, plan: WholePlan, rank: int, delays: Delays, scale: float, steps: int):
        problem = plan.problem
        stages = problem.placement.stages_of[rank]
        self._position = {stage: position for position, stage in enumerate(stages)}

        def drawn(step: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
            costs = drawn_costs(problem, draw(delays.jitter, problem, delays.seed, (0,), step))
            duration, latency = (
                np.rint(cost[..., 0][:, stages] * (scale * 1e9)).astype(np.int64) for cost in costs
            )
            return duration, latency

        self._steps = [drawn(step) for step in range(steps)]
        self._duration, self._latency = self._steps[0]
        self.begun: list[int] = []

    def begin(self, step: int) -> None:
        """Begin a step."""
        self.begun.clear()
        self._duration, self._latency = self._steps[step]

    def of_action(self, letter: str, stage: int, microbatch: int) -> int:
        """The duration of an action."""
        return int(self._duration[LETTERS.index(letter), self._position[stage], microbatch])

    def of_input(self, letter: str, stage: int, microbatch: int) -> int:
        """The latency of the input of F, I or B."""
        return int(self._latency[int(letter != "F"), self._position[stage], microbatch])


class DelayedStage:
    """A stage whose actions sleep drawn times, and wait until the drawn latency of their input is over.

    Parameters
    ----------
    output_bytes
        Size of F's output; None for the last stage, whose F returns a loss.
    gradient_bytes
        Size of the gradient from I and B; None for the first stage, which returns none.
    device
        The simulated device, shared by all stages of a rank.
    ahead
        This rank's clock minus rank 0's, in ns. Tensors carry times of rank 0's clock.
    """

    def __init__(
        self,
        index: int,
        times: DrawnTimes,
        output_bytes: int | None,
        gradient_bytes: int | None,
        device: SleepingDevice,
        ahead: int = 0,
    ):
        self._index = index
        self._times = times
        self._output_bytes = output_bytes
        self._gradient_bytes = gradient_bytes
        self._device = device
        self._ahead = ahead

    def forward(self, microbatch: int, input: Tensor, target: Tensor | None = None, *, split: bool) -> Tensor:
        """Sleep for F."""
        ended = self._take("F", microbatch, None if self._index == 0 else input)
        return torch.zeros(()) if self._output_bytes is None else _stamped(self._output_bytes, ended)

    def backward(self, microbatch: int, grad_output: Tensor | None) -> Tensor | None:
        """Sleep for B."""
        return self._gradient(self._take("B", microbatch, grad_output))

    def backward_input(self, microbatch: int, grad_output: Tensor | None) -> Tensor | None:
        """Sleep for I."""
        return self._gradient(self._take("I", microbatch, grad_output))

    def backward_weight(self, microbatch: int) -> None:
        """Sleep for W."""
        self._take("W", microbatch, None)

    def _take(self, letter: str, microbatch: int, input: Tensor | None) -> int:
        """Let an action take its time; returns its end on rank 0's clock."""
        arrival = None
        if input is not None:
            latency = self._times.of_input(letter, self._index, microbatch)
            arrival = _stamp(input) + self._ahead + latency
        nanoseconds = self._times.of_action(letter, self._index, microbatch)
        due = self._device.take(nanoseconds, arrival)
        self._times.begun.append(due - nanoseconds)
        return due - self._ahead

    def _gradient(self, ended: int) -> Tensor | None:
        return None if self._gradient_bytes is None else _stamped(self._gradient_bytes, ended)


class DelayedTimeline(HostTimeline):
    """An action starts when its delayed input arrives, not when the real tensor does."""

    def __init__(self, clock: Clock, times: DrawnTimes):
        super().__init__(clock)
        self._begun = times.begun

    def resolved(self, records: Sequence[Record], bounds: Sequence[float]) -> tuple[Record, ...]:
        """See :meth:`HostTimeline.resolved`."""
        # The last record is the end of the step, and no action.
        actions = zip(records, self._begun, strict=False)
        started = [record._replace(start=max(record.start, begin)) for record, begin in actions]
        return (*started, *records[len(started) :])


def ahead_of_rank_0(offset: Offset) -> int:
    """A rank's clock minus rank 0's; 0 if that is possible, because ranks of one host share a clock."""
    return 0 if abs(offset.ahead) <= offset.uncertainty else offset.ahead


def _stamped(size: int, time: int) -> Tensor:
    """A new float32 vector of at least ``size`` bytes that carries a time."""
    made = torch.zeros(max(_FLOATS_OF_STAMP, -(-size // torch.float32.itemsize)))
    made[:_FLOATS_OF_STAMP].view(torch.int64)[0] = time
    return made


def _stamp(tensor: Tensor) -> int:
    # A copy, because a tensor in a packed message may not be aligned.
    return int(tensor[:_FLOATS_OF_STAMP].clone().view(torch.int64).item())
