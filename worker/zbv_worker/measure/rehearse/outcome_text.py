"""A rehearsal's outcome as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.table import Table

from zbv_worker.measure.rehearse.outcome import Link, Outcome
from zbv_worker.measure.tables import table_of_numbers

_SHOWN_LINKS = 3


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """The outcome as JSON, times in seconds."""
    return {**asdict(outcome), "ratio": outcome.ratio if outcome.planned > 0 else None}


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
    if outcome.links:
        links = sorted(outcome.links, key=lambda link: -link.median)
        yield "Transfers that ranks waited for, the slowest pairs first:"
        yield from map(_link, links[:_SHOWN_LINKS])
    yield overhead(outcome)
    yield f"Clocks of the ranks agree to {outcome.clock_uncertainty * 1e6:.0f} us"


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
