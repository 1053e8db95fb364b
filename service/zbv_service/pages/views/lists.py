"""The lists: searches, plans, runs and agents, with what they are filtered by and ways to go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from zbv_service.pages.shell import Shell, render
from zbv_service.pages.views.rows import AgentEntry, PlanEntry, RunEntry, SearchEntry


@dataclass(frozen=True)
class ListView:
    """What a list was asked for, and where its neighbours are.

    Attributes
    ----------
    values
        The parameters of its address as they were given, without the empty ones.
    newer, older
        Addresses of the pages around, without the prefix of a proxy; None of none.
    """

    values: Mapping[str, Sequence[str]] = field(default_factory=dict)
    newer: str | None = None
    older: str | None = None

    def one(self, name: str) -> str:
        """A parameter that is given once; empty when it is not."""
        return self.values.get(name, [""])[-1]

    def has(self, name: str, value: str) -> bool:
        """Whether a parameter is given with this value."""
        return value in self.values.get(name, ())

    @property
    def is_filtered(self) -> bool:
        """Whether anything is left out."""
        return bool(self.values.keys() - {"cursor", "limit"})


def searches_page(rows: Sequence[SearchEntry], asked: ListView, shell: Shell) -> str:
    """Searches, the newest first."""
    return render("searches.html.j2", shell, rows=rows, asked=asked)


def plans_page(rows: Sequence[PlanEntry], asked: ListView, shell: Shell) -> str:
    """Plans, the newest first."""
    return render("plans.html.j2", shell, rows=rows, asked=asked)


def runs_page(rows: Sequence[RunEntry], asked: ListView, shell: Shell) -> str:
    """Runs, the newest first."""
    return render("runs.html.j2", shell, rows=rows, asked=asked)


def agents_page(
    rows: Sequence[AgentEntry], asked: ListView, shell: Shell, now: datetime | None = None
) -> str:
    """The list of agents, newest first; their last heartbeats are shown relative to ``now``."""
    now = now or datetime.now(UTC)
    ages = {row.id: ago((now - row.seen_at).total_seconds()) for row in rows}
    return render("agents.html.j2", shell, rows=rows, asked=asked, ages=ages)


def ago(seconds: float) -> str:
    """How long ago something was, in one unit: ``12 s ago``."""
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"
