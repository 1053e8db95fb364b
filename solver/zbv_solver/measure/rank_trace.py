"""The trace that every rank of a run writes, and the actions of all traces together.

A trace holds the latest steps with one plan. Per action it has the times when the rank began to wait for the
input, when the input had arrived, and when the action ended (docs/formats.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Annotated, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from zbv_solver.documents.fields import AtMost
from zbv_solver.documents.validation import require_kind, validated
from zbv_solver.errors import InvalidInput
from zbv_solver.kernels.jit import FloatArray, IntArray
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.numeric import MAX_ACTIONS
from zbv_solver.problem.problem import F, Problem, W

Number = TypeVar("Number", np.int64, np.float64)
Nanoseconds = Annotated[int, Field(strict=True, ge=-(2**62), le=2**62)]
Index = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]
Bytes = Annotated[int, Field(strict=True, ge=0, le=2**62)]
Record = tuple[str, Nanoseconds, Nanoseconds, Nanoseconds, Bytes]
"""Action, wait, start, end, bytes received from another rank."""

MAX_STEPS = 1000
Seconds = Annotated[float, Field(ge=0)]
CurvePoint = tuple[Index, Seconds, float | None]
"""Step, seconds, loss."""

WAIT, START, END = range(3)
"""Columns of :attr:`StepTrace.times`."""


class _Document(BaseModel):
    model_config = ConfigDict(extra="allow")


class StepTraceDocument(_Document):
    """One step of one rank."""

    step: Index
    loss: float | None = Field(None, description="On ranks that have the last stage.")
    seconds: Seconds
    actions: Annotated[list[Record], AtMost(MAX_ACTIONS)] = Field(
        description="In execution order: the action, when the rank began to wait for its input, when the "
        "input had arrived, when the action ended (nanoseconds of the rank's clock), and the bytes received."
    )


class RankTraceDocument(_Document):
    """The measurements of one rank in the latest steps with one plan."""

    rank: Index
    pp_rank: Index = Field(description="Its rank in the pipeline.")
    replica: Index = 0
    plan_id: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    clock_offset_ns: Nanoseconds = Field(0, description="How far its clock is ahead of rank 0's.")
    uncertainty_ns: Nanoseconds = Field(0, description="The offset is wrong by at most this.")
    curve: Annotated[list[CurvePoint], AtMost(MAX_STEPS)] = Field(
        [],
        description="Step, seconds and loss of all steps since the rank started, evenly thinned if there are "
        "many; the loss is null on ranks without the last stage.",
    )
    steps: Annotated[list[StepTraceDocument], AtMost(MAX_STEPS)]


@dataclass(frozen=True, eq=False)
class StepTrace:
    """One step of one rank, n actions."""

    step: int
    loss: float | None
    orders: Orders
    """The rank's actions in execution order, as the orders of one rank."""
    times: NDArray[np.int64]
    """(n, 3), nanoseconds of rank 0's clock: wait, start, end."""
    received: NDArray[np.int64]
    """(n,) bytes that came from another rank."""


@dataclass(frozen=True, eq=False)
class RankTrace:
    """The measurements of one rank; ``steps`` ascend. ``uncertainty`` of its times is in nanoseconds."""

    rank: int
    pp_rank: int
    replica: int
    plan_id: str
    uncertainty: int
    steps: tuple[StepTrace, ...]

    @property
    def numbers(self) -> frozenset[int]:
        """The numbers of the steps."""
        return frozenset(step.step for step in self.steps)

    def only(self, numbers: frozenset[int]) -> RankTrace:
        """The same trace with only these steps."""
        return replace(self, steps=tuple(step for step in self.steps if step.step in numbers))


def parse_rank_trace(document: Any) -> RankTrace:
    """Parse a decoded trace; its times are converted to rank 0's clock.

    Raises :class:`InvalidInput` when the document does not have the shape of a trace, or its steps do not
    ascend.
    """
    require_kind(document, "trace")
    parsed = validated(RankTraceDocument, document)
    steps = tuple(_step(index, step, parsed.clock_offset_ns) for index, step in enumerate(parsed.steps))
    for index, (before, step) in enumerate(pairwise(steps), start=1):
        if step.step <= before.step:
            found = f"found {step.step} after {before.step}; must ascend."
            raise InvalidInput.at(f"/steps/{index}/step", found)
    return RankTrace(
        parsed.rank, parsed.pp_rank, parsed.replica, parsed.plan_id, parsed.uncertainty_ns, steps
    )


def _step(index: int, document: StepTraceDocument, ahead: int) -> StepTrace:
    try:
        orders = Orders.from_text([[record[0] for record in document.actions]])
    except InvalidInput as error:
        (issue,) = error.issues
        action = issue.pointer.rpartition("/")[2]
        raise InvalidInput.at(f"/steps/{index}/actions/{action}/0", issue.detail) from None
    if orders.paired is not None:
        raise InvalidInput.at(
            f"/steps/{index}/actions", "found a pair; a trace has the times of single actions."
        )
    numbers = np.array([record[1:] for record in document.actions], dtype=np.int64).reshape(-1, 4)
    times = numbers[:, :3] - ahead
    descends = (np.diff(times, axis=1) < 0).any(axis=1)
    if descends.any():
        at = f"/steps/{index}/actions/{int(np.argmax(descends))}"
        raise InvalidInput.at(at, "its times do not ascend; must be wait, start, end in nanoseconds.")
    return StepTrace(document.step, document.loss, orders, times, numbers[:, 3])


@dataclass(frozen=True, eq=False)
class Samples:
    """The n actions of all traces; ``run`` numbers the pairs of replica and step. Times are in ns.

    Both actions of a pair have the times of the pair.
    """

    run: IntArray
    stage: IntArray
    letter: IntArray
    microbatch: IntArray
    times: IntArray
    half: IntArray
    """(n,) 1 for the first action of a pair, 2 for its second, 0 for an action that ran alone."""

    @property
    def duration(self) -> FloatArray:
        """(n,) in nanoseconds."""
        return (self.times[:, END] - self.times[:, START]).astype(np.float64)

    def alone(self) -> Samples:
        """The actions that ran alone."""
        return Samples(*(getattr(self, each.name)[self.half == 0] for each in fields(self)))


def collect(problem: Problem, traces: Sequence[RankTrace], orders: Orders | None = None) -> Samples:
    """The actions of all traces; parameters and errors are those of :func:`.refit`."""
    if problem.communication is not None and orders is None:
        raise InvalidInput.at(
            "/costs/communication",
            "found a problem with pairs; traces do not name pairs, so give the orders that ran, too.",
        )
    runs: dict[tuple[int, int], int] = {}
    parts: list[tuple[IntArray, ...]] = []
    for trace in traces:
        for step in trace.steps:
            ran = step.orders
            _require_of(problem, trace, ran)
            run = np.full(len(ran), runs.setdefault((trace.replica, step.step), len(runs)))
            half = _halves(trace, ran, orders)
            times = with_pairs_whole(step.times, np.flatnonzero(half == 1))
            parts.append((run, ran.stage, ran.letter, ran.microbatch, times, half))
    if not any(len(times) for *_, times, _ in parts):
        raise InvalidInput.at("/steps", "found no measured action; let the ranks finish a step first.")
    return Samples(*(np.concatenate(column).astype(np.int64) for column in zip(*parts, strict=True)))


def with_pairs_whole(times: NDArray[Number], first: IntArray) -> NDArray[Number]:
    """The times (n, 3) of actions, where the two of a pair have those of the pair.

    ``first`` are the indices of the pairs' first actions.
    """
    whole = times.copy()
    for column in (WAIT, START):
        whole[first, column] = np.minimum(times[first, column], times[first + 1, column])
    whole[first, END] = np.maximum(times[first, END], times[first + 1, END])
    whole[first + 1] = whole[first]
    return whole


def _halves(trace: RankTrace, ran: Orders, orders: Orders | None) -> IntArray:
    """As :attr:`Samples.half`, for a rank that ran its list of these orders."""
    half = np.zeros(len(ran), np.int64)
    if orders is None or orders.paired is None:
        return half
    if ran.all_text() != [orders.without_pairs().without_copies().text(trace.pp_rank)]:
        raise InvalidInput.at(
            "/steps", f"rank {trace.rank} did not run its list of the plan; use traces of this plan."
        )
    first = np.array(orders.pairs(trace.pp_rank), np.int64)
    half[first], half[first + 1] = 1, 2
    return half


def _require_of(problem: Problem, trace: RankTrace, orders: Orders) -> None:
    p, m = problem.pp_degree, problem.microbatches
    if trace.pp_rank >= p:
        raise InvalidInput.at("/pp_rank", f"found {trace.pp_rank}; the problem has ranks 0 to {p - 1}.")
    hosted = np.array(problem.placement.stages_of[trace.pp_rank])
    for name, found, allowed in (
        ("stage", orders.stage, hosted),
        ("microbatch", orders.microbatch, np.arange(m)),
    ):
        wrong = np.setdiff1d(found, allowed)
        if len(wrong):
            raise InvalidInput.at(
                "/steps",
                f"rank {trace.rank} ran {name} {wrong[0]}, which does not belong to rank {trace.pp_rank} of "
                f"the pipeline; use traces of a plan of this problem.",
            )


def grouped_medians(group: IntArray, values: FloatArray, groups: int) -> FloatArray:
    """The median of every group of values; nan for an empty group."""
    by_group = np.argsort(group, kind="stable")
    begins = np.searchsorted(group[by_group], np.arange(groups + 1))
    found = np.full(groups, np.nan)
    for index in np.flatnonzero(np.diff(begins)):
        found[index] = np.median(values[by_group[begins[index] : begins[index + 1]]])
    return found


def latencies(problem: Problem, samples: Samples) -> tuple[IntArray, FloatArray, IntArray]:
    """Boundary, latency in ns and kind of microbatch of every transfer that its receiver waited for; (k,).

    A pair waits for two inputs, so its transfers do not count.
    """
    n_stages, m = problem.n_stages, problem.microbatches
    down = samples.letter == F
    shape = (int(samples.run.max()) + 1, 2, n_stages, m)
    done = np.full(shape, np.iinfo(np.int64).min)
    makes = samples.letter != W
    at = (samples.run, down.astype(np.int64), samples.stage, samples.microbatch)
    done[tuple(index[makes] for index in at)] = samples.times[makes, END]
    source = samples.stage + np.where(down, -1, 1)
    boundary = np.minimum(samples.stage, source)
    is_remote = np.zeros(n_stages + 1, dtype=bool)  # by boundary; the last entry serves -1
    is_remote[: n_stages - 1] = [not problem.placement.is_local(b) for b in range(n_stages - 1)]
    taken = makes & (source >= 0) & (source < n_stages) & is_remote[boundary] & (samples.half == 0)
    sent = done[samples.run[taken], at[1][taken], source[taken], samples.microbatch[taken]]
    times = samples.times[taken]
    waited_for = (sent > np.iinfo(np.int64).min) & (times[:, WAIT] < sent)
    latency = np.maximum(times[waited_for, START] - sent[waited_for], 0).astype(np.float64)
    kind = problem.arrays.kind_of[samples.microbatch[taken][waited_for]]
    return boundary[taken][waited_for], latency, kind
