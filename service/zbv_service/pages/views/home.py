"""The front page: an introduction, the latest plans, current activity, and how to submit a problem."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zbv_service.pages.shell import Shell, render
from zbv_service.pages.views.rows import PlanEntry, RunEntry, SearchEntry

EXAMPLE: dict[str, Any] = {
    "pp_degree": 4,
    "microbatches": 16,
    "costs": {"forward": 1000, "backward_input": 1100, "backward_weight": 700, "p2p": 50},
    "memory": {"forward": 2, "backward_input": -1, "backward_weight": -1, "limit": 16},
    "units": {"time": "us"},
}
"""An example problem: four ranks, an uneven backward, and the memory of 1F1B."""


@dataclass(frozen=True)
class Now:
    """Current activity: the newest open searches and runs, and counts of all by state."""

    searches: Sequence[SearchEntry]
    runs: Sequence[RunEntry]
    searches_by_state: Mapping[str, int]
    runs_by_state: Mapping[str, int]
    agents_by_state: Mapping[str, int]

    @property
    def agents(self) -> int:
        """Agents that are live or draining."""
        return self.agents_by_state["live"] + self.agents_by_state["draining"]


def home_page(plans: Sequence[PlanEntry], now: Now, shell: Shell) -> str:
    """The front page."""
    is_new = not plans and not any(now.searches_by_state.values())
    return render(
        "home.html.j2", shell, plans=plans, now=now, is_new=is_new, example=_on_lines({"problem": EXAMPLE})
    )


def _on_lines(document: dict[str, Any]) -> str:
    """A body as readable JSON: one line per member of the problem."""
    members = ",\n    ".join(f'"{name}": {json.dumps(value)}' for name, value in document["problem"].items())
    return f'{{"problem": {{\n    {members}}}}}'
