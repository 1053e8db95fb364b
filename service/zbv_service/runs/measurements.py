"""Measured steps of a run: their durations, and one compared with its plan: its timeline and its account."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

from zbv_solver.errors import InvalidInput
from zbv_solver.measure.rank_trace import RankTrace
from zbv_solver.plans.plan import Plan

from zbv_service.compute.computations import Computations
from zbv_service.compute.waiting import Cache
from zbv_service.database import PartTable
from zbv_service.documents.problems import unpack
from zbv_service.plans.plans import Plans
from zbv_service.plans.renderings import plan_of
from zbv_service.records.runs import PartInfo, RunDocument, StepDocument
from zbv_service.runs.measured.accounts import Account, KindTimes, account, kind_times
from zbv_service.runs.measured.explain import Explanation, explain
from zbv_service.runs.measured.step import (
    ClockConflict,
    MeasuredStep,
    clock_conflict,
    lay_out,
    nanoseconds_of_unit,
    step_length,
    typical,
)
from zbv_service.runs.parts import parse_traces

MANY_ACTIONS = 100_000
FEW_STEPS = 5
"""For plans with more than :data:`MANY_ACTIONS` actions, only so many of the newest steps are considered."""
CACHED = 8

T = TypeVar("T")


@dataclass(frozen=True)
class Chosen:
    """The requested step; None selects the newest generation and the step of median length."""

    generation: int | None = None
    replica: int = 0
    step: int | None = None


@dataclass(frozen=True)
class NothingMeasured:
    """Why there is nothing to compare with the plan: a keyword and a sentence."""

    reason: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class TraceSource:
    """The generation and replica of some traces, and all generations and replicas that have traces."""

    generation: int = 0
    generations: tuple[int, ...] = (0,)
    replica: int = 0
    replicas: tuple[int, ...] = (0,)


@dataclass(frozen=True, eq=False, kw_only=True)
class Measured(TraceSource):
    """A step of a run, compared with its plan."""

    plan: Plan
    lengths: dict[int, float]
    """The length of each step that all ranks have, in the plan's unit, by step."""
    step: MeasuredStep
    is_typical: bool
    """Whether the step was chosen for its median length."""
    missing: tuple[int, ...]
    """Pipeline ranks that have not sent the step."""
    account: Account
    explanation: Explanation
    kinds: tuple[KindTimes, ...]
    conflict: ClockConflict
    nanoseconds: float
    has_named_unit: bool
    """Whether the plan names its time unit; otherwise a fitting one was chosen."""


class Measurements:
    """Reads and analyses measured steps in other processes, and caches what pages show of them."""

    def __init__(self, parts: PartTable, plans: Plans, computations: Computations):
        self._computations = computations
        self._parts = parts
        self._plans = plans
        self._made: Cache[Any] = Cache(CACHED)

    async def of(self, run: RunDocument, chosen: Chosen, show: partial[T]) -> T | NothingMeasured:
        """What a function shows of the requested step of a run, or why there is none.

        Parameters
        ----------
        show
            The function of :class:`Measured`, importable in another process; its arguments are the same for
            everyone who gets the same page.
        """
        index = [part for part in await self._parts.index(run.id) if part.kind == "trace"]
        generations = tuple(sorted({part.generation for part in index}))
        if not generations:
            return _nothing_yet(run)
        generation = generations[-1] if chosen.generation is None else chosen.generation
        present = [part for part in index if part.generation == generation]
        parts = _of_one_plan([part for part in present if part.replica == chosen.replica])
        if not parts:
            return NothingMeasured(
                "unknown",
                f"Generation {generation} has sent no trace of replica {chosen.replica}. There are traces of "
                f"{_listed('generation', generations)}, replicas from 0.",
            )
        replicas = tuple(sorted({part.replica for part in present if part.replica is not None}))
        source = TraceSource(
            generation=generation, generations=generations, replica=chosen.replica, replicas=replicas
        )
        newest = max(part.updated_at for part in parts).isoformat()
        key = f"{run.id} {generation} {chosen.replica} {chosen.step} {newest} {len(parts)} {show.args}"
        run_there = partial(measure_packed, chosen.step, source, show)
        made: T | NothingMeasured = await self._made.get(key, lambda: self._measure(run.id, parts, run_there))
        return made

    async def _measure(
        self, run_id: str, parts: Sequence[PartInfo], run_there: Callable[[PackedTraces], Any]
    ) -> Any:
        plan = await self._plans.packed(parts[0].plan_id or "")
        ranks = [part.rank for part in parts]
        traces = await self._parts.read(run_id, parts[0].generation, "trace", ranks)
        try:
            return await self._computations.run(run_there, (plan, [trace.body for trace in traces]))
        except InvalidInput as error:
            return NothingMeasured("foreign", f"The traces do not fit the run's plan: {error}")


PackedTraces = tuple[bytes, list[bytes]]
"""A plan and traces of its ranks, packed."""


def measure_packed(
    step: int | None, source: TraceSource, show: Callable[[Measured], T], packed: PackedTraces
) -> T | NothingMeasured:
    """What a function shows of the result of :func:`measure`."""
    plan = plan_of(packed[0])
    traces = [trace for trace in parse_traces(packed[1]) if trace.plan_id == plan.plan_id]
    found = measure(plan, traces, step, source)
    return found if isinstance(found, NothingMeasured) else show(found)


def measure(
    plan: Plan, traces: Sequence[RankTrace], step: int | None, source: TraceSource
) -> Measured | NothingMeasured:
    """Analyse a step of one replica, by default the one of median length. Large plans take seconds.

    Raises
    ------
    InvalidInput
        A rank did not run its actions of the plan.
    """
    numbers = most_shared(traces)
    if not numbers:
        return NothingMeasured("no-step", "The traces of the ranks have no finished step.")
    if step is not None and step not in numbers:
        return NothingMeasured(
            "unknown", f"Step {step} is not kept any more, or not yet sent; {_listed('step', numbers)} are."
        )
    if len(plan.orders) > MANY_ACTIONS:
        numbers = tuple(n for n in numbers if n in numbers[-FEW_STEPS:] or n == step)
    nanoseconds, has_named_unit = nanoseconds_of_unit(plan, traces)
    steps = [lay_out(plan, traces, number, nanoseconds) for number in numbers]
    shown = typical(plan, steps) if step is None else steps[numbers.index(step)]
    found = account(plan, shown)
    return Measured(
        **asdict(source),
        plan=plan,
        lengths={each.step: step_length(plan, each) for each in steps},
        step=shown,
        is_typical=step is None,
        missing=tuple(rank for rank in range(plan.problem.pp_degree) if rank not in shown.ranks),
        account=found,
        explanation=explain(plan, shown, found),
        kinds=kind_times(plan, steps),
        conflict=clock_conflict(plan, shown),
        nanoseconds=nanoseconds,
        has_named_unit=has_named_unit,
    )


def most_shared(traces: Sequence[RankTrace]) -> tuple[int, ...]:
    """The steps that the most ranks have, ascending; some ranks may have sent nothing or lag behind."""
    counted = Counter(number for trace in traces for number in trace.numbers)
    most = max(counted.values(), default=0)
    return tuple(sorted(number for number, count in counted.items() if count == most))


def _of_one_plan(parts: Sequence[PartInfo]) -> list[PartInfo]:
    """The parts of the plan that was measured last; around a change of plans, ranks send traces of both."""
    if not parts:
        return []
    newest = max(parts, key=lambda part: -1 if part.last_step is None else part.last_step)
    return [part for part in parts if part.plan_id == newest.plan_id]


def _nothing_yet(run: RunDocument) -> NothingMeasured:
    if run.state in ("failed", "cancelled"):
        return NothingMeasured(
            "ended", "The run ended before its ranks had sent a trace. Its events and logs say why."
        )
    if run.state == "succeeded":
        return NothingMeasured("ended", "The run ended, and its ranks sent no trace.")
    return NothingMeasured(
        "early",
        "Ranks send measurements a few seconds after their first steps. This page shows them then.",
    )


def _listed(noun: str, numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    return f"{noun}s {numbers[0]} to {numbers[-1]}"


MOST_READ = 16
"""Most ranks with traces to read, spread over the pipeline: unpacking hundreds of traces takes seconds."""
GENERATIONS = 32
"""The newest generations, of which steps are read."""
CACHED_TRACES = 512


class RunSteps:
    """Reads steps from traces, each trace once."""

    def __init__(self, parts: PartTable, computations: Computations):
        self._parts = parts
        self._computations = computations
        self._read: Cache[tuple[StepDocument, ...]] = Cache(CACHED_TRACES)

    async def of(self, run_id: str, index: Sequence[PartInfo]) -> list[StepDocument]:
        """The steps of the first replica, ascending.

        A generation continues from a checkpoint: its steps replace those of earlier ones from there on.
        """
        traces = [part for part in index if part.kind == "trace" and part.replica == 0]
        steps: dict[int, StepDocument] = {}
        for generation in sorted({part.generation for part in traces})[-GENERATIONS:]:
            parts = sorted(
                (part for part in traces if part.generation == generation), key=lambda part: part.rank
            )
            new = _slowest(await asyncio.gather(*(self._of(run_id, part) for part in _spread(parts))))
            begin = min(new, default=0)
            steps = {step: known for step, known in steps.items() if not new or step < begin} | new
        return [steps[step] for step in sorted(steps)]

    async def _of(self, run_id: str, part: PartInfo) -> tuple[StepDocument, ...]:
        async def load() -> tuple[StepDocument, ...]:
            found = await self._parts.read(run_id, part.generation, "trace", [part.rank])
            return await self._computations.run(_steps, found[0].body) if found else ()

        key = f"{run_id} {part.generation} {part.rank} {part.updated_at.isoformat()}"
        return await self._read.get(key, load)


def _slowest(ranks: Sequence[Sequence[StepDocument]]) -> dict[int, StepDocument]:
    """By step: the time of the slowest rank, and the loss of the rank that has it."""
    steps: dict[int, StepDocument] = {}
    for new in (step for rank in ranks for step in rank):
        known = steps.setdefault(new.step, new)
        loss = new.loss if known.loss is None else known.loss
        steps[new.step] = StepDocument(step=new.step, seconds=max(new.seconds, known.seconds), loss=loss)
    return steps


def _spread(parts: Sequence[PartInfo]) -> list[PartInfo]:
    """At most :data:`MOST_READ` parts, with the first and the last rank, of which one has the loss."""
    if len(parts) <= MOST_READ:
        return list(parts)
    return [parts[index * (len(parts) - 1) // (MOST_READ - 1)] for index in range(MOST_READ)]


def _steps(packed: bytes) -> tuple[StepDocument, ...]:
    """The steps of a rank's trace: its curve, and the newest ones, which are complete."""
    trace = unpack(packed)
    points = [*trace.get("curve", ())]
    points += [(entry["step"], entry["seconds"], entry.get("loss")) for entry in trace["steps"]]
    return tuple(
        StepDocument(step=step, seconds=seconds, loss=loss)
        for step, seconds, loss in {point[0]: point for point in points}.values()
    )
