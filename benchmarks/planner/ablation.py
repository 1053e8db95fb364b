"""What each stage of the search adds: a full run of a suite, compared with a run without the stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.planner.measure import Outcome
from benchmarks.planner.verdicts import verdict


@dataclass(frozen=True)
class Contribution:
    """What a stage adds over a suite.

    Attributes
    ----------
    log_ratio
        Sum over instances of ln(value without the stage / value with it): positive where it helps.
    better, worse, tighter
        Instances with a better plan, a worse plan, and a better bound with the stage. A plan can be worse
        because the stage takes time from others.
    proved
        Instances proved optimal only with the stage, less those proved only without.
    seconds
        Additional time of the suite with the stage; negative if it ended searches early.
    """

    stage: str
    instances: int
    log_ratio: float
    better: int
    worse: int
    tighter: int
    proved: int
    seconds: float


def contribution(stage: str, full: Sequence[Outcome], without: Sequence[Outcome]) -> Contribution:
    """Compare two runs of the same instances, in the same order; infeasible instances are ignored."""
    pairs = [(a, b) for a, b in zip(full, without, strict=True) if a.curve and b.curve]
    verdicts = [verdict(a.value, b.value) for a, b in pairs]
    ratios = [b.value / a.value for a, b in pairs if a.value > 0 and b.value > 0]
    return Contribution(
        stage=stage,
        instances=len(pairs),
        log_ratio=sum(math.log(ratio) for ratio in ratios),
        better=verdicts.count("win"),
        worse=verdicts.count("loss"),
        tighter=sum(verdict(b.lower_bound, a.lower_bound) == "win" for a, b in pairs),
        proved=sum((a.gap == 0) - (b.gap == 0) for a, b in pairs),
        seconds=sum(a.seconds - b.seconds for a, b in pairs),
    )
