"""A rehearsal's result: planned and measured step, and where the difference comes from.

On every rank a step of length T consists of time in actions, time between them, and waiting; the plan says
how much is actions and how much is waiting. So for each rank

    T - planned T = actions that took longer + time between actions + unplanned waiting

If the objective is the span, steps follow each other directly, and T is the time from the last end of one
step to the last end of the next. A makespan is the time from a step's first start to its last end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from zbv_solver.export.quantities import SECONDS, relative, time

from zbv_worker.execution.plan_source import WholePlan
from zbv_worker.execution.rank_plan import producer_of
from zbv_worker.measure.tables import table_of_numbers
from zbv_worker.tracing.merged_trace import END, START, WAIT, RankTrace

_FIRST_MEASURED = 1
_NANO = 1e-9


class CpuUse(NamedTuple):
    """CPU time in nanoseconds of the executor's thread and of its process, and the number of actions."""

    thread: int
    process: int
    actions: int


@dataclass(frozen=True)
class RankTimes:
    """One rank's step in seconds; medians over the steps."""

    rank: int
    busy: float
    planned_busy: float
    """Time in actions."""
    waiting: float
    planned_waiting: float
    """Time of waiting for other ranks."""
    between: float
    """Time from the end of an action until the rank turns to the next: the executor's own time."""

    @property
    def unplanned_waiting(self) -> float:
        """Waiting in excess of the plan's; negative if there was less."""
        return self.waiting - self.planned_waiting


@dataclass(frozen=True)
class Link:
    """Transfers from one rank to another, in seconds, of which the receiver waited for the tensor.

    The times of other transfers are unknown. A transfer lasts from its producer's end to its consumer's
    start.
    """

    sender: int
    receiver: int
    count: int
    median: float
    slow: float
    """A tenth of the transfers take longer than this."""
    planned: float


@dataclass(frozen=True)
class Outcome:
    """A rehearsal's result; times in seconds."""

    plan_id: str
    objective: str
    planned: float
    measured: float
    """The length of a step: span or makespan, according to ``objective``. ``measured`` is the median of
    ``steps``."""
    steps: tuple[float, ...]
    actions: int
    ranks: tuple[RankTimes, ...]
    links: tuple[Link, ...]
    cpu_thread: float
    cpu_process: float
    """CPU time per action without the sleeps, of the executor's thread and of its process including the
    transport's threads; the mean over the ranks."""
    clock_uncertainty: float
    """The largest error between times of different ranks."""

    @property
    def ratio(self) -> float:
        """Measured divided by planned."""
        return self.measured / self.planned if self.planned > 0 else float("inf")


def compare(
    plan: WholePlan,
    scale: float,
    traces: Sequence[RankTrace],
    cpu: Sequence[CpuUse],
    clock_uncertainty: float,
) -> Outcome:
    """Compare traces on one clock with the plan; their first step is warm-up.

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
    """The length of every measured step, in seconds."""
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
    busy, between = (nanoseconds[_FIRST_MEASURED:] * _NANO for nanoseconds in trace.divided())
    return RankTimes(
        rank=trace.rank,
        busy=float(np.median(busy)),
        planned_busy=planned_busy,
        waiting=float(np.median(lengths - busy - between)),
        planned_waiting=planned - planned_busy,
        between=float(np.median(between)),
    )


def _links(plan: WholePlan, scale: float, traces: Sequence[RankTrace]) -> Iterator[Link]:
    """The duration of transfers that were waited for, by pair of ranks."""
    where = {
        (action.stage, action.letter == "F", action.microbatch): (trace.rank, index)
        for trace in traces
        for index, action in enumerate(trace.actions)
        if action.letter != "W"
    }
    found: dict[tuple[int, int], list[float]] = {}
    planned: dict[tuple[int, int], float] = {}
    arrays = plan.problem.arrays
    for trace in traces:
        for index, action in enumerate(trace.actions):
            if not trace.received[-1, index]:
                continue
            source = where[producer_of(action)]
            boundary = action.stage - 1 if action.letter == "F" else action.stage
            pair = (source[0], trace.rank)
            latency = float(arrays.latency[boundary, arrays.kind_of[action.microbatch]])
            planned[pair] = max(planned.get(pair, 0.0), latency * scale)
            found.setdefault(pair, []).extend(_under_way(traces[source[0]], source[1], trace, index))
    for (sender, receiver), seconds in sorted(found.items()):
        if seconds:
            slow = float(np.quantile(seconds, 0.9))
            yield Link(sender, receiver, len(seconds), median(seconds), slow, planned[sender, receiver])


def _under_way(producer: RankTrace, made: int, consumer: RankTrace, used: int) -> list[float]:
    """Seconds of one transfer, in every measured step in which its receiver waited for it."""
    sent = producer.times[_FIRST_MEASURED:, made, END]
    times = consumer.times[_FIRST_MEASURED:, used]
    waited_for = times[:, WAIT] < sent
    seconds: list[float] = ((times[:, START] - sent)[waited_for] * _NANO).tolist()
    return seconds


_SHOWN_LINKS = 3
_time = partial(time, units=SECONDS)


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """The outcome as JSON, times in seconds."""
    return {**asdict(outcome), "ratio": outcome.ratio if outcome.planned > 0 else None}


def table(outcome: Outcome) -> Table:
    """A table with one row per rank."""
    columns = ("rank", "actions", "planned", "waiting", "planned", "unplanned", "between")
    shown = table_of_numbers("A step of every rank, ms (medians)", *columns)
    for times in outcome.ranks:
        seconds = (times.busy, times.planned_busy, times.waiting, times.planned_waiting)
        shown.add_row(
            str(times.rank),
            *(f"{round(each * 1e3, 1) + 0:.1f}" for each in seconds),  # + 0 turns -0.0 into 0.0
            f"{times.unplanned_waiting * 1e3:+.1f}",
            f"{times.between * 1e3:.1f}",
        )
    return shown


def sentences(outcome: Outcome) -> Iterator[str]:
    """The result in a few sentences."""
    fastest, slowest = min(outcome.steps), max(outcome.steps)
    yield (
        f"{outcome.objective} of plan {outcome.plan_id[:12]}: planned {_time(outcome.planned)}, "
        f"measured {_time(outcome.measured)}, {relative(outcome.measured, outcome.planned)} (median of "
        f"{len(outcome.steps)} steps, {_time(fastest)} to {_time(slowest)})"
    )
    if outcome.links:
        links = sorted(outcome.links, key=lambda link: -link.median)
        yield "Transfers that ranks waited for, the slowest pairs first:"
        yield from map(_link, links[:_SHOWN_LINKS])
    yield overhead(outcome)
    yield f"Clocks of the ranks agree to {_time(outcome.clock_uncertainty)}"


def overhead(outcome: Outcome) -> str:
    """The CPU time of running the plan, in a sentence."""
    return (
        f"CPU time per action, without the sleeps: {_time(outcome.cpu_thread)} in the executor's "
        f"thread, {_time(outcome.cpu_process)} with the transport's threads"
    )


def _link(link: Link) -> str:
    return (
        f"  {link.sender} → {link.receiver}: median {_time(link.median)}, a tenth over {_time(link.slow)} "
        f"({link.count} transfers); planned {_time(link.planned)}"
    )
