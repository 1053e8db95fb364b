"""How far predictions are from measurements: ratios, rank correlations, and the targets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import StatisticsError, correlation, mean, median

import numpy as np
from rich.table import Table
from zbv_solver.errors import InfeasibleMemory, InvalidInput

from benchmarks.findings import BenchmarkError, Finding, at_least, at_most
from benchmarks.published.predict import Prediction, predict, published_step
from benchmarks.published.runs import MeasuredRun

LEAST_CORRELATION = 0.8
MOST_TIME_ERROR = 15.0
MOST_MEMORY_ERROR = 10.0
NEAR, LEAST_NEAR = 0.25, 90.0
LEAST_OUT_OF_MEMORY = 80.0
LEAST_RUNS = 3
"""Runs that a rank correlation needs."""
GIGA = 1e9
NOT_OF_A_LAYOUT = {"id", "source", "held_out", "step_time_s", "step_time_from", "model_tflops"}
NOT_OF_A_LAYOUT |= {"memory_gb", "memory_kind", "memory_rank"}
"""Keys of a run that do not say what ran."""


@dataclass(frozen=True)
class Throughput:
    """Predicted and measured tokens per second and device of a run, and what identifies its layout."""

    layout: Hashable
    predicted: float
    measured: float


@dataclass(frozen=True)
class Judged:
    """A run, its measured step in seconds (None if it has none), and its prediction."""

    run: MeasuredRun
    step_time: float | None
    prediction: Prediction

    @property
    def time_ratio(self) -> float | None:
        """Predicted over measured step time."""
        return None if self.step_time is None else self.prediction.step_time / self.step_time

    @property
    def memory_ratio(self) -> float | None:
        """Predicted over measured memory."""
        measured = self.run.memory_gb
        return None if measured is None else self.prediction.memory / GIGA / measured

    @property
    def throughput(self) -> Throughput:
        """Predicted and measured, of a run with a step time."""
        tokens = self.run.global_batch * self.run.sequence / self.run.devices
        layout = self.run.model_dump_json(exclude=NOT_OF_A_LAYOUT)
        return Throughput(layout, tokens / self.prediction.step_time, tokens / (self.step_time or 1.0))


@dataclass(frozen=True)
class Refused:
    """A run without a prediction, and why."""

    run: MeasuredRun
    reason: str


def judge(runs: Iterable[MeasuredRun]) -> tuple[list[Judged], list[Refused]]:
    """Predict every run."""
    judged, refused = [], []
    for run in runs:
        try:
            judged.append(Judged(run, published_step(run), predict(run)))
        except (InvalidInput, InfeasibleMemory) as error:
            refused.append(Refused(run, str(error)))
    if not judged:
        raise BenchmarkError(f"no run can be predicted. The first: {refused[0].reason}")
    return judged, refused


def models_table(judged: Sequence[Judged]) -> Table:
    """A row per system and model."""
    table = Table(title="predicted / measured, by system and model", title_justify="left")
    table.add_column("system")
    table.add_column("model")
    for column in ("runs", "step time", "least", "most", "rank correlation", "memory"):
        table.add_column(column, justify="right")
    throughputs = _throughputs(judged)
    for (system, name), group in _grouped(judged).items():
        times, memory = _times(group), _memory(group)
        rank = of_runs(throughputs[system, name])
        table.add_row(
            system,
            name,
            str(len(group)),
            *((f"{of(times):.2f}" if times else "") for of in (median, min, max)),
            "" if rank is None else f"{rank:.2f}",
            f"{median(memory):.2f}" if memory else "",
        )
    return table


def findings(judged: Sequence[Judged], refused: Sequence[Refused]) -> list[Finding]:
    """All numbers with targets, and the distribution by system."""
    held_out = [each for each in judged if each.run.held_out]
    return [
        *_errors("", judged),
        *_distributions(judged),
        *_room_findings(judged),
        *_errors("held out: ", held_out),
        Finding("runs without a prediction", len(refused)),
    ]


def _errors(which: str, judged: Sequence[Judged]) -> Iterable[Finding]:
    """The numbers with targets: of all runs, and of those that played no part in choosing rules."""
    if ranks := _ranks(judged):
        what = f"{which}rank correlation of throughput, mean of {len(ranks)} models"
        yield Finding(what, mean(ranks), target=at_least(LEAST_CORRELATION))
    if times := _times(judged):
        what = f"{which}step time, median error of {len(times)} runs"
        yield Finding(what, _error(times), "%", at_most(MOST_TIME_ERROR))
    if memory := _memory(judged):
        what = f"{which}memory, median error of {len(memory)} runs"
        yield Finding(what, _error(memory), "%", at_most(MOST_MEMORY_ERROR))
        yield Finding(f"{which}  within 25 %", _near(memory), "%", at_least(LEAST_NEAR))


def _distributions(judged: Sequence[Judged]) -> Iterable[Finding]:
    """Of layouts, and of step times by system."""
    groups = _throughputs(judged)
    layouts = [rank for runs in groups.values() if (rank := of_layouts(runs)) is not None]
    if layouts:
        what = f"rank correlation of layouts, repeated ones with their median, {len(layouts)} models"
        yield Finding(what, mean(layouts))
    times = _times(judged)
    if times:
        within = 100 * float(np.quantile(np.abs(np.array(times) - 1), 0.9))
        yield Finding("step time, 90 % of runs within", within, "%")
    for system in dict.fromkeys(each.run.system for each in judged):
        own = _times([each for each in judged if each.run.system == system])
        if own:
            yield Finding(f"  {system}, {len(own)} runs", _error(own), "%")
            low, high = np.quantile(own, (0.1, 0.9)).tolist()
            yield Finding("    ratio, median and middle 80 %", median(own), interval=(low, high))


def _room_findings(judged: Sequence[Judged]) -> Iterable[Finding]:
    """Runs that ended for lack of memory, and, so that the first number means something, all the others."""
    ended = [each.prediction.is_too_large for each in judged if each.run.out_of_memory]
    if ended:
        what = f"{len(ended)} runs out of memory: predicted"
        yield Finding(what, 100 * mean(ended), "%", at_least(LEAST_OUT_OF_MEMORY))
    for words, is_stated in (("stated", True), ("unknown", False)):
        others = [
            each.prediction.is_too_large
            for each in judged
            if not each.run.out_of_memory and (each.run.recompute is not None) is is_stated
        ]
        if others:
            what = f"  {len(others)} others, recomputation {words}: wrongly predicted"
            yield Finding(what, 100 * mean(others), "%")


def _grouped(judged: Sequence[Judged]) -> dict[tuple[str, str], list[Judged]]:
    found: dict[tuple[str, str], list[Judged]] = defaultdict(list)
    for each in judged:
        found[each.run.system, each.run.name].append(each)
    return found


def _throughputs(judged: Sequence[Judged]) -> dict[tuple[str, str], list[Throughput]]:
    """Of the runs of every system and model that have a step time."""
    return {
        group: [each.throughput for each in runs if each.step_time is not None]
        for group, runs in _grouped(judged).items()
    }


def _ranks(judged: Sequence[Judged]) -> list[float]:
    """Rank correlation of every system and model that has one."""
    return [rank for runs in _throughputs(judged).values() if (rank := of_runs(runs)) is not None]


def _times(group: Sequence[Judged]) -> list[float]:
    return [each.time_ratio for each in group if each.time_ratio is not None]


def _memory(group: Sequence[Judged]) -> list[float]:
    return [each.memory_ratio for each in group if each.memory_ratio is not None]


def _error(ratios: Sequence[float]) -> float:
    """Median distance from 1, in percent."""
    return 100 * median(abs(ratio - 1) for ratio in ratios)


def _near(ratios: Sequence[float]) -> float:
    """Share of ratios that are near 1, in percent."""
    return 100 * mean(abs(ratio - 1) <= NEAR for ratio in ratios)


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Rank correlation, ties with their mean rank (Spearman 1904); None if all values are the same."""
    try:
        return correlation(_places(first), _places(second))
    except StatisticsError:
        return None


def _places(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    ends = {value: place for place, value in enumerate(ordered)}
    return [(ordered.index(value) + ends[value]) / 2 for value in values]


def of_runs(runs: Sequence[Throughput]) -> float | None:
    """Rank correlation of the runs of a model; None if they are too few or predicted to be equal."""
    if len(runs) < LEAST_RUNS:
        return None
    return spearman([run.predicted for run in runs], [run.measured for run in runs])


def of_layouts(runs: Sequence[Throughput]) -> float | None:
    """The same, with one value for the runs of a layout: the median."""
    by_layout: dict[Hashable, list[Throughput]] = defaultdict(list)
    for run in runs:
        by_layout[run.layout].append(run)
    return of_runs(
        [replace(own[0], measured=median(run.measured for run in own)) for own in by_layout.values()]
    )
