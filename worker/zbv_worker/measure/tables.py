"""Tables of numbers for a terminal."""

from __future__ import annotations

from rich.table import Table


def table_of_numbers(title: str, *columns: str) -> Table:
    """A table without rows; headings should be short enough for a terminal of 80 columns."""
    shown = Table(title=title, title_justify="left")
    for column in columns:
        shown.add_column(column, justify="right", no_wrap=True)
    return shown
