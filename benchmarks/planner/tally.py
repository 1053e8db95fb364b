"""Counts and means over a run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.planner.measure import Outcome
from benchmarks.planner.verdicts import judge, reached


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
    judgements = [judge(outcome) for outcome in outcomes]
    verdicts = Counter(judgement.verdict for judgement in judgements)
    gaps = [(o.gap, o.instance.name) for o in outcomes if math.isfinite(o.gap)]
    worst, name = max(gaps, default=(None, None))
    logs = [math.log(j.ratio) for j in judgements if j.ratio is not None and 0 < j.ratio < math.inf]
    return Tally(
        instances=len(outcomes),
        infeasible=sum(o.infeasible is not None for o in outcomes),
        optimal=sum(gap == 0 for gap, _ in gaps),
        mean_gap=sum(gap for gap, _ in gaps) / len(gaps) if gaps else None,
        worst_gap=worst,
        worst_name=name,
        wins=verdicts["win"],
        ties=verdicts["tie"],
        losses=verdicts["loss"],
        no_peer=verdicts["no peer"],
        ratio=math.exp(sum(logs) / len(logs)) if logs else None,
        below_bound=sum(bool(j.below_bound) for j in judgements),
        contradicted=sum(bool(j.contradicting) for j in judgements),
        reached=sum(reached(o) for o in outcomes),
        targets=sum(o.instance.reach is not None for o in outcomes),
        seconds=sum(o.seconds for o in outcomes),
    )
