"""The lists of searches, plans, runs and agents, with filters and links to neighbouring pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from zbv_service.pages.shell import Shell, render
from zbv_service.pages.views.rows import AgentEntry, PlanEntry, RunEntry, SearchEntry


@dataclass(frozen=True)
class ListView:
    """The query of a list, and the addresses of the neighbouring pages.

    Attributes
    ----------
    values
        The non-empty parameters of its address.
    newer, older
        Addresses of the neighbouring pages, without the prefix of a proxy; None if there is none.
    """

    values: Mapping[str, Sequence[str]] = field(default_factory=dict)
    newer: str | None = None
    older: str | None = None

    def one(self, name: str) -> str:
        """The value of a parameter; empty if it is missing."""
        return self.values.get(name, [""])[-1]

    def has(self, name: str, value: str) -> bool:
        """Whether a parameter has this value."""
        return value in self.values.get(name, ())

    @property
    def is_filtered(self) -> bool:
        """Whether a filter is set."""
        return bool(self.values.keys() - {"cursor", "limit"})


def searches_page(rows: Sequence[SearchEntry], asked: ListView, shell: Shell) -> str:
    """Searches, newest first."""
    return render("searches.html.j2", shell, rows=rows, asked=asked)


def plans_page(rows: Sequence[PlanEntry], asked: ListView, shell: Shell) -> str:
    """Plans, newest first."""
    return render("plans.html.j2", shell, rows=rows, asked=asked)


def runs_page(rows: Sequence[RunEntry], asked: ListView, shell: Shell) -> str:
    """Runs, newest first."""
    return render("runs.html.j2", shell, rows=rows, asked=asked)


def agents_page(
    rows: Sequence[AgentEntry], asked: ListView, shell: Shell, now: datetime | None = None
) -> str:
    """The list of agents, newest first; their last heartbeats are shown relative to ``now``."""
    now = now or datetime.now(UTC)
    ages = {row.id: ago((now - row.seen_at).total_seconds()) for row in rows}
    return render("agents.html.j2", shell, rows=rows, asked=asked, ages=ages)


def ago(seconds: float) -> str:
    """An age in one unit: ``12 s ago``."""
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"
