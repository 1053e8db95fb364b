"""The progress of a search on standard error: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from zbv_service.client import Search

LINE_SECONDS = 2.0
"""The shortest time between two plain lines, except for a change of state and the first plan."""


class SearchProgress:
    """Shows the state of a search. The bar fills as the lower bound approaches the best plan's objective."""

    def __init__(self, search: Search, *, is_quiet: bool = False):
        console = Console(stderr=True)
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(20),
            TimeElapsedColumn(),
        )
        self._is_quiet = is_quiet
        self._has_bar = console.is_terminal and not is_quiet
        self._bar = Progress(*columns, console=console, transient=True, disable=not self._has_bar)
        self._task = self._bar.add_task(f"search {search.id[:8]}: {search.state}", total=1.0)
        self._stage = ("", True)
        self._printed_at = -LINE_SECONDS
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, search: Search) -> None:
        """Show the search's present state."""
        text = f"search {search.id[:8]}: {search.state}"
        if search.objective is not None:
            text += f", {summary(search)}"
        if self._has_bar:
            share = 0.0 if search.gap is None else 1.0 / (1.0 + search.gap)
            self._bar.update(self._task, description=text, completed=share)
        elif not self._is_quiet:
            now, stage = time.monotonic(), (search.state, search.objective is None)
            if stage != self._stage or now - self._printed_at >= LINE_SECONDS:
                self._printed_at, self._stage = now, stage
                print(f"{now - self._began:7.1f} s  {text}", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """Print a message, even when quiet: it answers a key that the user pressed."""
        if self._has_bar:
            self._bar.console.print(f"zbv-service: {text}", markup=False, highlight=False)
        else:
            print(f"zbv-service: {text}", file=sys.stderr, flush=True)


def summary(search: Search) -> str:
    """The best objective, the lower bound, the gap between them, and the method that found the plan."""
    from zbv_solver.export import quantities  # takes a while to import; --help does not need it
    from zbv_solver.problem.problem import Units

    units = quantities.stated(Units(time=search.summary.get("time_unit")))
    parts = [] if search.objective is None else [f"objective {quantities.time(search.objective, units)}"]
    if search.lower_bound is not None:
        parts.append(f"bound {quantities.time(search.lower_bound, units)}")
    if search.gap is not None:
        parts.append(f"gap {quantities.percent(search.gap)}")
    if search.method:
        parts.append(search.method)
    return ", ".join(parts)
