"""How well predictions order the runs of a model, and how well any prediction could.

Runs of the same layout differ, for reasons that no key of a run describes. The ceiling says what that costs:
the rank correlation of a prediction that knows the median of every layout, with runs that deviate from it as
repeated runs of the same system do (a bootstrap of their deviations; Efron 1979). It is an upper estimate:
measured medians contain the same noise, so layouts differ less than they seem to. Where a system repeats no
layout, no noise is known, and the ceiling is 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import log, sqrt
from statistics import StatisticsError, correlation, mean, median

import numpy as np

LEAST_RUNS = 3
"""Runs that a rank correlation needs."""
DRAWS = 200


@dataclass(frozen=True)
class Throughput:
    """Predicted and measured tokens per second and device of a run, and what identifies its layout."""

    layout: Hashable
    predicted: float
    measured: float


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Rank correlation, ties with their mean rank (Spearman 1904); None if all values are the same."""
    try:
        return correlation(_ranks(first), _ranks(second))
    except StatisticsError:
        return None


def _ranks(values: Sequence[float]) -> list[float]:
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
    medians = _medians(runs)
    if len(medians) < LEAST_RUNS:
        return None
    predicted = {run.layout: run.predicted for run in runs}
    return spearman([predicted[layout] for layout in medians], list(medians.values()))


def ceilings(
    groups: Mapping[tuple[str, str], Sequence[Throughput]],
) -> dict[tuple[str, str], list[float]]:
    """What a prediction that knows the median of every layout would get, in every draw.

    The groups are systems and models; those without a rank correlation are left out.
    """
    deviations: dict[str, list[float]] = defaultdict(list)
    for (system, _), runs in groups.items():
        deviations[system] += _deviations(runs)
    random, found = np.random.default_rng(0), {}
    for group, runs in groups.items():
        if of_runs(runs) is None:
            continue
        noise, medians = deviations[group[0]], _medians(runs)
        known = [medians[run.layout] for run in runs]
        draws = [1.0] * DRAWS
        if noise:
            drawn = random.choice(noise, (DRAWS, len(runs)))
            measured = (np.log(known) + drawn).tolist()
            draws = [rank for each in measured if (rank := spearman(known, each)) is not None]
        if len(draws) == DRAWS:
            found[group] = draws
    return found


def _medians(runs: Sequence[Throughput]) -> dict[Hashable, float]:
    """Median measured throughput of every layout."""
    measured: dict[Hashable, list[float]] = defaultdict(list)
    for run in runs:
        measured[run.layout].append(run.measured)
    return {layout: median(values) for layout, values in measured.items()}


def _deviations(runs: Sequence[Throughput]) -> list[float]:
    """Logarithms of repeated runs over the mean of their layout, with the spread of a single run."""
    repeated: dict[Hashable, list[float]] = defaultdict(list)
    for run in runs:
        repeated[run.layout].append(log(run.measured))
    found = []
    for values in repeated.values():
        count = len(values)
        if count > 1:
            found += [(value - mean(values)) * sqrt(count / (count - 1)) for value in values]
    return found
