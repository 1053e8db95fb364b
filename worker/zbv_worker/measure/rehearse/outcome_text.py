"""A rehearsal's outcome as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from statistics import median
from typing import Any

import numpy as np
from rich.table import Table

from zbv_worker.measure.rehearse.outcome import Link, Outcome, Simulated
from zbv_worker.measure.tables import table_of_numbers

_SHOWN_LINKS = 3
_P95 = 0.95


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """The outcome as JSON, times in seconds."""
    document = {**asdict(outcome), "ratio": outcome.ratio if outcome.planned > 0 else None}
    if outcome.simulated is None:
        del document["simulated"]
        return document
    mean, p95 = (
        {"measured": measured, "simulated": simulated}
        for measured, simulated in _mean_and_p95(outcome, outcome.simulated)
    )
    return {**document, "mean": mean, "p95": p95}


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
        f"{outcome.objective} of plan {outcome.plan_id[:12]}: planned {_ms(outcome.planned)}, measured "
        f"{_ms(outcome.measured)}, {outcome.ratio - 1:+.2%} (median of {len(outcome.steps)} steps, "
        f"{_ms(fastest)} to {_ms(slowest)})"
    )
    if outcome.simulated is not None:
        yield from _with_jitter(outcome, outcome.simulated)
    if outcome.links:
        links = sorted(outcome.links, key=lambda link: -link.median)
        yield "Transfers that ranks waited for, the slowest pairs first:"
        yield from map(_link, links[:_SHOWN_LINKS])
    yield overhead(outcome)
    yield f"Clocks of the ranks agree to {outcome.clock_uncertainty * 1e6:.0f} us"


def _with_jitter(outcome: Outcome, simulated: Simulated) -> Iterator[str]:
    names = ("mean", "p95")
    both = ", ".join(
        f"{name} simulated {_ms(expected)}, measured {_ms(measured)}, {_excess(measured, expected):+.2%}"
        for name, (measured, expected) in zip(names, _mean_and_p95(outcome, simulated), strict=True)
    )
    yield f"Steps with jitter: {both}"
    differences = list(map(_excess, outcome.steps, simulated.steps))
    yield (
        f"Step by step, measured over simulated: median {median(differences):+.2%}, "
        f"{min(differences):+.2%} to {max(differences):+.2%}"
    )


def _mean_and_p95(outcome: Outcome, simulated: Simulated) -> Iterator[tuple[float, float]]:
    """The mean, and then the p95, of the measured and of the simulated steps."""
    steps = np.array([outcome.steps, simulated.steps])
    for measured, expected in (steps.mean(axis=1), np.quantile(steps, _P95, axis=1)):
        yield float(measured), float(expected)


def _excess(measured: float, expected: float) -> float:
    return measured / expected - 1 if expected > 0 else float("inf")


def overhead(outcome: Outcome) -> str:
    """The CPU time of running the plan, in a sentence."""
    return (
        f"CPU time per action, without the sleeps: {outcome.cpu_thread * 1e6:.0f} us in the executor's "
        f"thread, {outcome.cpu_process * 1e6:.0f} us with the transport's threads"
    )


def _link(link: Link) -> str:
    return (
        f"  {link.sender} → {link.receiver}: median {_ms(link.median)}, a tenth over {_ms(link.slow)} "
        f"({link.count} transfers); planned {_ms(link.planned)}"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms" if seconds < 0.1 else f"{seconds * 1e3:.1f} ms"
