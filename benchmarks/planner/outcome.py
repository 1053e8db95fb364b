"""Search one instance; compare the plan with peers and targets; sum up.

If a peer with another placement is below our proven bound, no plan with the problem's placement can reach it.
It is named but does not count.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, geometric_mean
from typing import Literal, NamedTuple

from zbv_solver.errors import InfeasibleMemory, InvalidPlan
from zbv_solver.problem.numeric import OPTIMAL_GAP
from zbv_solver.search.incumbent import Cancelled, Progress
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search

from benchmarks.planner.suite import Instance

Verdict = Literal["win", "tie", "loss", "no peer"]
SAME_FIGURE = 1e-6
"""Relative to a figure: published results tie within this, because authors print few digits."""


@dataclass(frozen=True)
class Point:
    """The best plan and bound of a search at one moment."""

    seconds: float
    """Time since the start of the search."""
    objective: float
    lower_bound: float
    """In the problem's time unit; the plan was verified."""
    gap: float
    method: str


class Standing(NamedTuple):
    """A peer, and its objective."""

    name: str
    placement: str
    value: float


@dataclass(frozen=True)
class Outcome:
    """The result of a search of one instance, compared with the peers that fit the memory."""

    instance: Instance
    options: SearchOptions
    """The options of this search, including those of the instance."""
    seconds: float
    """Duration of the whole search, with final verification and baselines."""
    curve: tuple[Point, ...] = ()
    """Every report in order; the last one is that of the plan. Empty if no plan fits the memory."""
    infeasible: str | None = None
    """Why no plan fits the memory, or None."""
    cut: str | None = None
    """The reason why the search ended early, or None."""

    @property
    def value(self) -> float:
        """Value of the problem's objective; inf without a plan."""
        return self.curve[-1].objective if self.curve else math.inf

    @property
    def lower_bound(self) -> float:
        """The lower bound; inf if there can be no plan."""
        return self.curve[-1].lower_bound if self.curve else math.inf

    @property
    def gap(self) -> float:
        """value / lower_bound - 1; inf without a plan."""
        return self.curve[-1].gap if self.curve else math.inf

    @property
    def method(self) -> str | None:
        """The method that found the plan."""
        return self.curve[-1].method if self.curve else None

    @property
    def first_plan_seconds(self) -> float | None:
        """Seconds until the first verified plan."""
        return self.curve[0].seconds if self.curve else None

    @cached_property
    def _standings(self) -> list[Standing]:
        """Peers that fit, best first."""
        objective = self.instance.problem.objective
        values = (
            Standing(name, peer.placement, value)
            for name, peer in self.instance.peers.items()
            if peer.fits and (value := peer.value(objective)) is not None
        )
        return sorted(values, key=lambda standing: standing.value)

    def _below(self, is_comparable: bool) -> list[Standing]:
        """Peers below our bound with the problem's placement, or with other ones."""
        kind = self.instance.problem.placement.kind
        least = self.lower_bound * (1 - SAME_FIGURE)
        below = [standing for standing in self._standings if standing.value < least]
        return [standing for standing in below if (standing.placement == kind) == is_comparable]

    @property
    def below_bound(self) -> list[Standing]:
        """Peers with other placements below our bound, best first. They do not count."""
        return self._below(False)

    @property
    def contradicting(self) -> list[Standing]:
        """Peers with the problem's placement below our bound: one of the two is wrong."""
        return [each for each in self._below(True) if not self.instance.peers[each.name].is_goal]

    @property
    def best(self) -> Standing | None:
        """The best contender, or None."""
        below = self.below_bound
        return next((standing for standing in self._standings if standing not in below), None)

    @property
    def ratios(self) -> dict[str, float]:
        """Our value / that of every peer that fits, of those where it is finite and not 0."""
        found = {each.name: self.value / each.value for each in self._standings if each.value > 0}
        return {name: ratio for name, ratio in found.items() if 0 < ratio < math.inf}

    @property
    def ratio(self) -> float | None:
        """Our value / the best contender's; None without a contender, or if its value is 0."""
        return self.value / self.best.value if self.best is not None and self.best.value > 0 else None

    @property
    def verdict(self) -> Verdict:
        """Against the best contender."""
        return "no peer" if self.best is None else verdict(self.value, self.best.value)

    @property
    def reached_after(self) -> float | None:
        """Seconds until the target gap was proven; None if it was not, or if there is no target."""
        reach = self.instance.reach
        if reach is None:
            return None
        return next((point.seconds for point in self.curve if point.gap <= reach.gap + OPTIMAL_GAP), None)

    @property
    def is_reached(self) -> bool:
        """Whether the target was reached in time; False without a target."""
        reach, seconds = self.instance.reach, self.reached_after
        if reach is None or seconds is None:
            return False
        return reach.seconds is None or seconds <= reach.seconds


def verdict(ours: float, theirs: float) -> Verdict:
    """The smaller value wins; values within a millionth of each other tie."""
    if abs(ours - theirs) <= SAME_FIGURE * theirs:
        return "tie"
    return "win" if ours < theirs else "loss"


def measure(
    instance: Instance,
    options: SearchOptions,
    watch: Callable[[Progress], None] | None = None,
    cancelled: Cancelled | None = None,
) -> Outcome:
    """Search an instance. ``watch`` receives every report; ``cancelled`` is polled as in a search."""
    own = instance.search_options(options)
    curve: list[Point] = []
    began = time.perf_counter()

    def report(progress: Progress) -> None:
        now = time.perf_counter() - began
        curve.append(Point(now, progress.objective, progress.lower_bound, progress.gap, progress.method))
        if watch is not None:
            watch(progress)

    try:
        plan = search(instance.problem, own, on_progress=report, cancelled=cancelled)
    except InfeasibleMemory as error:
        rank = error.ranks[0]
        why = f"limit of rank {rank} is {error.limits[rank]:.8g}, needs {error.smallest[rank]:.8g}"
        seconds = time.perf_counter() - began
        return Outcome(instance, own, seconds, infeasible=f"no plan fits: {why}")
    except InvalidPlan as error:
        # The user's input is right, so this must not look like wrong input.
        raise RuntimeError(
            f"{instance.name}: the search made an invalid plan. This is a bug in zbv; please report it."
        ) from error
    seconds, metrics = time.perf_counter() - began, plan.metrics
    curve.append(Point(seconds, plan.objective, metrics.lower_bound, metrics.gap, plan.provenance.method))
    return Outcome(instance, own, seconds, tuple(curve), cut=plan.provenance.extra.get("cut"))


@dataclass(frozen=True)
class Tally:
    """Counts and means over the outcomes of a run."""

    instances: int
    infeasible: int
    optimal: int
    """Plans proved optimal."""
    mean_gap: float | None
    worst_gap: float | None
    worst_name: str | None
    """Over the plans with a finite gap; None without any."""
    wins: int
    ties: int
    losses: int
    no_peer: int
    ratio: float | None
    """Geometric mean of value / the best contender's value, over the instances with a contender."""
    by_peer: dict[str, float]
    """The same for every peer that fits on all instances."""
    below_bound: int
    """Instances with a fitting peer with another placement below our bound."""
    contradicted: int
    """Instances with a peer with the same placement below our bound."""
    reached: int
    targets: int
    """Number of targets reached in time, and of all targets."""
    seconds: float


def tally(outcomes: Sequence[Outcome]) -> Tally:
    """Sum up."""
    verdicts = Counter(outcome.verdict for outcome in outcomes)
    gaps = [(o.gap, o.instance.name) for o in outcomes if math.isfinite(o.gap)]
    worst, name = max(gaps, default=(None, None))
    ratios = [o.ratio for o in outcomes if o.ratio is not None and 0 < o.ratio < math.inf]
    by_peer: dict[str, list[float]] = {}
    for each in outcomes:
        for peer, ratio in each.ratios.items():
            by_peer.setdefault(peer, []).append(ratio)
    return Tally(
        instances=len(outcomes),
        infeasible=sum(o.infeasible is not None for o in outcomes),
        optimal=sum(gap == 0 for gap, _ in gaps),
        mean_gap=fmean(gap for gap, _ in gaps) if gaps else None,
        worst_gap=worst,
        worst_name=name,
        wins=verdicts["win"],
        ties=verdicts["tie"],
        losses=verdicts["loss"],
        no_peer=verdicts["no peer"],
        ratio=geometric_mean(ratios) if ratios else None,
        by_peer={
            peer: geometric_mean(found) for peer, found in by_peer.items() if len(found) == len(outcomes)
        },
        below_bound=sum(bool(o.below_bound) for o in outcomes),
        contradicted=sum(bool(o.contradicting) for o in outcomes),
        reached=sum(o.is_reached for o in outcomes),
        targets=sum(o.instance.reach is not None for o in outcomes),
        seconds=sum(o.seconds for o in outcomes),
    )
