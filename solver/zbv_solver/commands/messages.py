"""What commands print: documents, tables, progress, and errors that name flags as the user wrote them."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from zbv_solver.documents.files import write
from zbv_solver.errors import ContradictedBound, InvalidInput, Issue

if TYPE_CHECKING:  # rich is imported where it is used: --help does not need it
    from rich.table import Table

_LEFT, _WHOLE = ("", "schedule", "stages", "layer"), ("schedule", "plan", "layer")
"""Columns that are aligned to the left, and those that are never wrapped."""
_WIDEST = 1000
"""Columns of the widest table."""


def named_flags(error: InvalidInput) -> InvalidInput:
    """The same error with flags in place of pointers: ``/time_limit`` becomes ``--time-limit``."""
    issues = [Issue("", issue.detail, flag_of(issue.pointer[1:])) for issue in error.issues]
    return InvalidInput(issues, error.more, error.is_partial)


def flag_of(key: str) -> str:
    """The flag of a key of an options document."""
    return f"--{key.replace('_', '-')}"


def contradiction(error: ContradictedBound) -> str:
    """The message for a contradicted bound, after writing the problem to a file for a bug report.

    The file is a problem document that every command accepts. Its name is derived from its content, so the
    same problem is written once.
    """
    text = json.dumps(error.problem, sort_keys=True) + "\n"
    path = f"zbv-contradiction-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"
    try:
        write(path, text)
    except OSError as failure:
        return f"{error} The problem could not be written to {path}: {failure.strerror}."
    return f"{error} The problem is in {path}."


def print_json(document: object) -> None:
    """Print a document for people and programs."""
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def table_of(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table: names of schedules, stages and layers are aligned to the left, and numbers to the right."""
    from rich.table import Table

    table = Table(title=title)
    for name in columns:
        table.add_column(name, justify="left" if name in _LEFT else "right", no_wrap=name in _WHOLE)
    for row in rows:
        table.add_row(*row)
    return table


def print_whole(table: Table) -> None:
    """Print a table that never cuts a number; in a narrow terminal its lines wrap."""
    from rich.console import Console

    console = Console()
    with console.capture() as shown:
        console.print(table)
    if "…" in shown.get():  # rich has cut something
        console.width = console.measure(table, options=console.options.update(max_width=_WIDEST)).maximum
    console.print(table)


@contextmanager
def spinner(text: str) -> Iterator[Callable[[str], None]]:
    """Show a text on standard error, if that is a terminal; yields the function that changes the text."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    # Do not redirect standard output: results are written to it.
    with Progress(
        *columns, console=console, transient=True, redirect_stdout=False, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(text, total=None)
        yield lambda changed: bar.update(task, description=changed)
