"""Compare a measurement with the best peer, and with its target.

If a peer with another placement is below our proven bound, no plan with the problem's placement can reach it.
It is named but does not count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zbv_solver.problem.numeric import OPTIMAL_GAP

from benchmarks.planner.measure import Outcome
from benchmarks.planner.suite import Peer

Verdict = Literal["win", "tie", "loss", "no peer"]

SAME_FIGURE = 1e-6
"""Relative to a figure: published results tie within this, because authors print few digits."""


@dataclass(frozen=True)
class Standing:
    """A peer, and its objective."""

    peer: Peer
    value: float


@dataclass(frozen=True)
class Judgement:
    """A measurement, compared with the peers that fit the memory."""

    verdict: Verdict
    best: Standing | None
    """The best contender, or None."""
    ratio: float | None
    """Our value / the peer's; None without a contender, or if the peer's value is 0."""
    below_bound: tuple[Standing, ...]
    """Peers with other placements below our bound, best first. They do not count."""
    contradicting: tuple[Standing, ...]
    """Peers with the problem's placement below our bound: one of the two is wrong."""


def judge(outcome: Outcome) -> Judgement:
    """Compare a plan with the best contender by the problem's objective."""
    problem = outcome.instance.problem
    contenders: list[Standing] = []
    below: list[Standing] = []
    contradicting: list[Standing] = []
    for peer in outcome.instance.peers:
        value = peer.value(problem.objective)
        if value is None or not peer.fits:
            continue
        standing = Standing(peer, value)
        is_below = value < outcome.lower_bound * (1 - SAME_FIGURE)
        is_comparable = peer.placement == problem.placement.kind
        if is_comparable or not is_below:
            contenders.append(standing)
        if is_below:
            (contradicting if is_comparable else below).append(standing)
    best = min(contenders, key=_value, default=None)
    return Judgement(
        verdict="no peer" if best is None else verdict(outcome.value, best.value),
        best=best,
        ratio=outcome.value / best.value if best is not None and best.value > 0 else None,
        below_bound=tuple(sorted(below, key=_value)),
        contradicting=tuple(sorted(contradicting, key=_value)),
    )


def verdict(ours: float, theirs: float) -> Verdict:
    """The smaller value wins; values within a millionth of each other tie."""
    if abs(ours - theirs) <= SAME_FIGURE * theirs:
        return "tie"
    return "win" if ours < theirs else "loss"


def reached_after(outcome: Outcome) -> float | None:
    """Seconds until the target gap was proven; None if it was not, or if there is no target."""
    reach = outcome.instance.reach
    if reach is None:
        return None
    return next((p.seconds for p in outcome.curve if p.gap <= reach.gap + OPTIMAL_GAP), None)


def reached(outcome: Outcome) -> bool:
    """Whether the target was reached in time; False without a target."""
    reach, seconds = outcome.instance.reach, reached_after(outcome)
    if reach is None or seconds is None:
        return False
    return reach.seconds is None or seconds <= reach.seconds


def _value(standing: Standing) -> float:
    return standing.value
