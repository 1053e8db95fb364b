"""What a rehearsal found: the planned step beside the measured one, and where the difference went.

On every rank a step of length T consists of the time in actions, the time between them, and waiting; the plan
says how much of it is actions and how much is waiting. So of each rank's step

    T - planned T = actions that took longer + time between actions + waiting that was not planned

Where the objective is the span, steps follow each other back to back, and T is from the last end of one step
to the last end of the next. A makespan is from the first start of a step to its last end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from zbv_worker.execution.whole_plan import WholePlan
from zbv_worker.tracing.merged_trace import END, START, WAIT, RankTrace

_FIRST_MEASURED = 1
_NANO = 1e-9


@dataclass(frozen=True)
class CpuUse:
    """CPU time in nanoseconds of the thread that runs the plan, of its whole process, and for how much."""

    thread: int = 0
    process: int = 0
    actions: int = 0

    def since(self, earlier: CpuUse, actions: int) -> CpuUse:
        """What was used from then to now, for a number of actions."""
        return CpuUse(self.thread - earlier.thread, self.process - earlier.process, actions)


@dataclass(frozen=True)
class RankTimes:
    """One rank's step in seconds; medians over the steps.

    Attributes
    ----------
    busy, planned_busy
        In actions.
    waiting, planned_waiting
        For other ranks.
    between
        From the end of an action until the rank turns to the next: the executor itself.
    """

    rank: int
    busy: float
    planned_busy: float
    waiting: float
    planned_waiting: float
    between: float

    @property
    def unplanned_waiting(self) -> float:
        """Waiting beyond the plan's; negative when there was less."""
        return self.waiting - self.planned_waiting


@dataclass(frozen=True)
class Link:
    """Transfers from one rank to another, in seconds, of those that their receiver was waiting for.

    The others arrived unobserved. A transfer is timed from its producer's end to its consumer's start.
    """

    sender: int
    receiver: int
    count: int
    median: float
    slow: float
    """The slowest tenth take longer than this."""
    planned: float


@dataclass(frozen=True)
class Outcome:
    """A rehearsal's result; times in seconds.

    Attributes
    ----------
    planned, measured
        A step: span or makespan, as ``objective`` says. ``measured`` is the median of ``steps``.
    cpu_thread, cpu_process
        CPU time per action beside the sleeps, of the executor's thread and of its whole process with the
        transport's threads; the mean over the ranks.
    clock_uncertainty
        By which times of different ranks may be shifted against each other.
    """

    plan_id: str
    objective: str
    planned: float
    measured: float
    steps: tuple[float, ...]
    actions: int
    ranks: tuple[RankTimes, ...]
    links: tuple[Link, ...]
    cpu_thread: float
    cpu_process: float
    clock_uncertainty: float

    @property
    def ratio(self) -> float:
        """Measured over planned."""
        return self.measured / self.planned if self.planned > 0 else float("inf")


def compare(
    plan: WholePlan,
    scale: float,
    traces: Sequence[RankTrace],
    cpu: Sequence[CpuUse],
    clock_uncertainty: float,
) -> Outcome:
    """Hold traces on one clock against the plan; their first step is warm-up.

    Parameters
    ----------
    scale
        Seconds per time unit of the plan.
    """
    lengths = _lengths(plan.problem.objective, traces)
    planned = plan.objective_value * scale
    actions = sum(use.actions for use in cpu)
    return Outcome(
        plan_id=plan.plan_id,
        objective=plan.problem.objective,
        planned=planned,
        measured=float(np.median(lengths)),
        steps=tuple(lengths.tolist()),
        actions=len(plan.orders),
        ranks=tuple(_rank_times(trace, lengths, planned, plan.busy(trace.rank) * scale) for trace in traces),
        links=tuple(_links(plan, scale, traces)),
        cpu_thread=sum(use.thread for use in cpu) * _NANO / actions,
        cpu_process=sum(use.process for use in cpu) * _NANO / actions,
        clock_uncertainty=clock_uncertainty,
    )


def _lengths(objective: str, traces: Sequence[RankTrace]) -> NDArray[np.float64]:
    """Length of every measured step, in seconds."""
    ends = np.max([trace.times[:, -1, END] for trace in traces], axis=0)
    if objective == "span":
        nanoseconds = np.diff(ends)
    else:
        starts = np.min([trace.times[:, 0, START] for trace in traces], axis=0)
        nanoseconds = (ends - starts)[_FIRST_MEASURED:]
    seconds: NDArray[np.float64] = nanoseconds * _NANO
    return seconds


def _rank_times(
    trace: RankTrace, lengths: NDArray[np.float64], planned: float, planned_busy: float
) -> RankTimes:
    times = trace.times[_FIRST_MEASURED:]
    busy = (times[:, :, END] - times[:, :, START]).sum(axis=1) * _NANO
    between = (times[:, 1:, WAIT] - times[:, :-1, END]).sum(axis=1) * _NANO
    return RankTimes(
        rank=trace.rank,
        busy=float(np.median(busy)),
        planned_busy=planned_busy,
        waiting=float(np.median(lengths - busy - between)),
        planned_waiting=planned - planned_busy,
        between=float(np.median(between)),
    )


def _links(plan: WholePlan, scale: float, traces: Sequence[RankTrace]) -> Iterator[Link]:
    """Per pair of ranks, how long the transfers that were waited for were under way."""
    where = {
        (action.stage, action.letter == "F", action.microbatch): (trace.rank, index)
        for trace in traces
        for index, action in enumerate(trace.actions)
        if action.letter != "W"
    }
    found: dict[tuple[int, int], list[float]] = {}
    planned: dict[tuple[int, int], float] = {}
    for trace in traces:
        for index, action in enumerate(trace.actions):
            if not trace.received[-1, index]:
                continue
            down = action.letter == "F"
            source = where[action.stage + (-1 if down else 1), down, action.microbatch]
            boundary = action.stage - 1 if down else action.stage
            pair = (source[0], trace.rank)
            planned[pair] = max(planned.get(pair, 0.0), plan.problem.costs.p2p[boundary] * scale)
            found.setdefault(pair, []).extend(_under_way(traces[source[0]], source[1], trace, index))
    for (sender, receiver), seconds in sorted(found.items()):
        if seconds:
            slow = float(np.quantile(seconds, 0.9))
            yield Link(sender, receiver, len(seconds), median(seconds), slow, planned[sender, receiver])


def _under_way(producer: RankTrace, made: int, consumer: RankTrace, used: int) -> list[float]:
    """Seconds of one transfer in every measured step in which its receiver was there before it."""
    sent = producer.times[_FIRST_MEASURED:, made, END]
    times = consumer.times[_FIRST_MEASURED:, used]
    waited_for = times[:, WAIT] < sent
    seconds: list[float] = ((times[:, START] - sent)[waited_for] * _NANO).tolist()
    return seconds
