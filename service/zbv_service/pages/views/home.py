"""The front page: what this is, what was found last, what goes on, and how to ask."""

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
"""A problem for a first look: four ranks, an uneven backward, and the memory of 1F1B."""


@dataclass(frozen=True)
class Now:
    """What goes on: the newest of what is open, and how much there is in all, by state."""

    searches: Sequence[SearchEntry]
    runs: Sequence[RunEntry]
    searches_by_state: Mapping[str, int]
    runs_by_state: Mapping[str, int]
    agents_by_state: Mapping[str, int]

    @property
    def agents(self) -> int:
        """Agents that are there."""
        return self.agents_by_state["live"] + self.agents_by_state["draining"]


def home_page(plans: Sequence[PlanEntry], now: Now, shell: Shell) -> str:
    """The newest plans as pictures, what goes on, and how to submit a problem."""
    is_new = not plans and not any(now.searches_by_state.values())
    return render(
        "home.html.j2", shell, plans=plans, now=now, is_new=is_new, example=_on_lines({"problem": EXAMPLE})
    )


def _on_lines(document: dict[str, Any]) -> str:
    """A body as JSON that is read and pasted: one line per member of the problem."""
    members = ",\n    ".join(f'"{name}": {json.dumps(value)}' for name, value in document["problem"].items())
    return f'{{"problem": {{\n    {members}}}}}'
