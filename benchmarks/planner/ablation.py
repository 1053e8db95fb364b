"""What each mechanism of the planner adds: suites planned in full, and again without the mechanism.

A mechanism is a phase of the search, a part of a phase, or a family of bounds. The search has options for its
phases; the others are replaced here, so that the planner needs no option for them. Efforts are numbers of
actions and moves, so the values do not depend on the machine; only seconds do.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any
from unittest.mock import patch

from zbv_solver.search.options import PHASES, SearchOptions

from benchmarks.planner.outcome import Outcome, verdict
from benchmarks.planner.suite import Instance


@dataclass(frozen=True)
class Mechanism:
    """A mechanism that can be left out."""

    name: str
    replaced: dict[str, Any] = field(default_factory=dict)
    """What stands in for a function or a constant of the planner, by ``module:name``; empty for a phase of
    the search, which the options leave out."""
    of_differing: bool = False
    """Whether it works only where microbatches differ."""

    def concerns(self, instance: Instance) -> bool:
        """Whether a search of the instance may use the mechanism."""
        return not (self.of_differing and instance.problem.is_equal)

    @contextmanager
    def left_out(self, options: SearchOptions) -> Iterator[SearchOptions]:
        """The options of a search without the mechanism, as long as the context lasts."""
        if not self.replaced:
            yield replace(options, without=(*options.without, self.name))
            return
        with ExitStack() as stack:
            for target, value in self.replaced.items():
                module, _, name = target.partition(":")
                stack.enter_context(patch.object(import_module(f"zbv_solver.{module}"), name, value))
            yield options


def _nothing(*_: object) -> Iterator[Any]:
    return iter(())


def _zero(*_: object) -> float:
    return 0.0


MECHANISMS = (
    *(Mechanism(phase, of_differing=phase == "overtake") for phase in PHASES),
    Mechanism("rest search", {"search.run:REST_SHARE": 0.0}),
    Mechanism("bound: few ranks", {"bounds.few_ranks:few_ranks_bounds": _nothing}),
    Mechanism(
        "bound: ramps",
        {"bounds:ramp_bound": _zero, "bounds:machine_bound": _zero, "bounds:other_rank_bound": _zero},
    ),
    Mechanism("bound: passing", {"bounds.overtaking:passing_of_ranks": _nothing}, of_differing=True),
    Mechanism("bound: differing ramps", {"bounds.differing_ramps:ramp_bounds": _nothing}, of_differing=True),
    Mechanism("bound: away", {"bounds.away_prices:away_bounds": _nothing}, of_differing=True),
)
"""Phases first, then parts of phases, then bounds; the last three are of microbatches that differ."""


@dataclass(frozen=True)
class Contribution:
    """What a mechanism adds over a suite."""

    mechanism: str
    suite: str
    instances: int
    log_ratio: float
    """Sum over instances of ln(value without the mechanism / value with it): positive where it helps."""
    worst: float
    """The largest of these logarithms: what an instance would lose."""
    better: int
    worse: int
    tighter: int
    """Instances with a better plan, a worse plan, and a better bound with the mechanism. A plan can be
    worse because the mechanism takes time from others."""
    gap: float
    """Mean gap without the mechanism, less that with it."""
    proved: int
    """Instances proved optimal only with the mechanism, less those proved only without."""
    seconds: float
    """Additional time of the suite with the mechanism; negative if it ended searches early."""


def contributions(
    mechanism: str, full: Sequence[Outcome], without: Sequence[Outcome]
) -> Iterator[Contribution]:
    """Compare two runs of the same instances in the same order, suite by suite."""
    suites: dict[str, list[tuple[Outcome, Outcome]]] = defaultdict(list)
    for a, b in zip(full, without, strict=True):
        suites[a.instance.suite].append((a, b))
    for suite, pairs in suites.items():
        yield _contribution(mechanism, suite, pairs)


def _contribution(mechanism: str, suite: str, runs: list[tuple[Outcome, Outcome]]) -> Contribution:
    """Compare the runs of a suite; infeasible instances are ignored."""
    pairs = [(a, b) for a, b in runs if a.curve and b.curve]
    verdicts = [verdict(a.value, b.value) for a, b in pairs]
    ratios = [math.log(b.value / a.value) for a, b in pairs if a.value > 0 and b.value > 0]
    gaps = [b.gap - a.gap for a, b in pairs if math.isfinite(a.gap) and math.isfinite(b.gap)]
    return Contribution(
        mechanism=mechanism,
        suite=suite,
        instances=len(pairs),
        log_ratio=sum(ratios),
        worst=max(ratios, default=0.0),
        better=verdicts.count("win"),
        worse=verdicts.count("loss"),
        tighter=sum(verdict(b.lower_bound, a.lower_bound) == "win" for a, b in pairs),
        gap=sum(gaps) / len(gaps) if gaps else 0.0,
        proved=sum((a.gap == 0) - (b.gap == 0) for a, b in pairs),
        seconds=sum(a.seconds - b.seconds for a, b in pairs),
    )


def ablation_table(entries: Sequence[Contribution]) -> str:
    """The contribution of each mechanism, one row per mechanism and suite."""
    heads = ("mechanism", "suite", *("better", "worse", "mean", "worst", "bounds", "gap", "proved", "s"))
    rows = [
        (
            entry.mechanism,
            entry.suite.rpartition("/")[2],
            f"{entry.better} of {entry.instances}",
            f"{entry.worse}",
            f"{math.expm1(entry.log_ratio / entry.instances):+.2%}" if entry.instances else "–",
            f"{math.expm1(entry.worst):+.2%}",
            f"{entry.tighter}",
            f"{100 * entry.gap:+.2f}",
            f"{entry.proved:+d}",
            f"{entry.seconds:+.0f}",
        )
        for entry in entries
    ]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = [
        "  ".join(
            text.ljust(width) if place < 2 else text.rjust(width)
            for place, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (heads, tuple("─" * width for width in widths), *rows)
    ]
    return "".join(f"{line}\n" for line in lines)
