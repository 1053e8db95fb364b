"""The page of one search."""

from __future__ import annotations

from zbv_service.pages.rows import SearchRow
from zbv_service.pages.shell import Shell, render


def search_page(
    row: SearchRow, shell: Shell, *, is_open: bool, lower_bound: float | None, method: str | None
) -> str:
    """What is found so far; while it is open, a browser reads it again every other second."""
    return render("search.html.j2", shell, row=row, is_open=is_open, lower_bound=lower_bound, method=method)
