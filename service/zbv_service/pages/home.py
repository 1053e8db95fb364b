"""The front page."""

from __future__ import annotations

from collections.abc import Sequence

from zbv_service.pages.rows import PlanRow, SearchRow
from zbv_service.pages.shell import Shell, render


def home_page(searches: Sequence[SearchRow], plans: Sequence[PlanRow], shell: Shell) -> str:
    """Latest searches and plans (newest first), and how to submit a problem."""
    return render("home.html.j2", shell, searches=searches, plans=plans)
