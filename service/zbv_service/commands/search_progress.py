"""How far a search is, on standard error: a line that changes on a terminal, plain lines elsewhere."""

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
"""Least time between two plain lines, but for a change of state and the first plan."""


class SearchProgress:
    """Shows what a search has found. The bar is how near the bound is to the best plan: full is optimal."""

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
        self._said_at = -LINE_SECONDS
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, search: Search) -> None:
        """What is known of it now."""
        text = f"search {search.id[:8]}: {search.state}"
        if search.objective is not None:
            text += f", {found_text(search)}"
        if self._has_bar:
            near = 0.0 if search.gap is None else 1.0 / (1.0 + search.gap)
            self._bar.update(self._task, description=text, completed=near)
        elif not self._is_quiet:
            now, stage = time.monotonic(), (search.state, search.objective is None)
            if stage != self._stage or now - self._said_at >= LINE_SECONDS:
                self._said_at, self._stage = now, stage
                print(f"{now - self._began:7.1f} s  {text}", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """Say something about the command itself, quiet or not: it answers a key that was pressed."""
        if self._has_bar:
            self._bar.console.print(f"zbv-service: {text}", markup=False, highlight=False)
        else:
            print(f"zbv-service: {text}", file=sys.stderr, flush=True)


def found_text(search: Search) -> str:
    """The best plan, the bound on every plan, the gap between them, and what found it."""
    parts = [] if search.objective is None else [f"objective {search.objective:.9g}"]
    if search.lower_bound is not None:
        parts.append(f"bound {search.lower_bound:.9g}")
    if search.gap is not None:
        parts.append(f"gap {search.gap:.2%}")
    if search.method:
        parts.append(search.method)
    return ", ".join(parts)
