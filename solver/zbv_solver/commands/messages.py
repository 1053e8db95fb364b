"""What commands print: documents, tables, progress, and errors that name flags as the user wrote them."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Thread
from typing import TYPE_CHECKING

from zbv_solver.documents.files import write
from zbv_solver.errors import ContradictedBound, InvalidInput, Issue

if TYPE_CHECKING:  # rich is imported where it is used: --help does not need it
    from rich.table import Table

_LEFT = ("", "schedule", "stages", "layer")
"""Columns that are aligned to the left."""
LINE_SECONDS = 15.0
"""Seconds between two lines of progress, where standard error is no terminal."""
_OTHERS = 12
"""Columns of a line of progress without its text: the spinner and the time."""
_WIDEST = 1000
"""Columns of the widest table."""


def named_flags(error: InvalidInput) -> InvalidInput:
    """The same error with flags in place of pointers: ``/time_limit`` becomes ``--time-limit``."""
    issues = [Issue("", issue.detail, flag_of(issue.pointer[1:])) for issue in error.issues]
    return InvalidInput(issues, error.more, error.is_partial)


def flag_of(key: str) -> str:
    """The flag of a key of an options document."""
    key = "sequence_length" if key == "sequence" else key  # one name in all commands
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
    """A table: names of schedules, stages and layers are aligned to the left, and numbers to the right.

    Lines are never wrapped, so that a number and its unit stay together.
    """
    from rich.table import Table

    table = Table(title=title)
    for name in columns:
        table.add_column(name, justify="left" if name in _LEFT else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def print_whole(table: Table, *, stderr: bool = False) -> None:
    """Print a table that never cuts a cell; in a narrow terminal its lines wrap."""
    from rich.console import Console

    console = Console(stderr=stderr)
    with console.capture() as shown:
        console.print(table)
    if "…" in shown.get():  # rich has cut something
        console.width = console.measure(table, options=console.options.update(max_width=_WIDEST)).maximum
    console.print(table)


@contextmanager
def spinner(text: str, limit: float | None = None) -> Iterator[Callable[[str], None]]:
    """Show what is being done on standard error, and the time; yields the function that changes the text.

    On a terminal the text is one line that changes. Elsewhere a line is printed now and then. ``limit`` is a
    time limit in seconds, which is shown with the time.
    """
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    of = "" if limit is None else f" of {limit:g} s"
    if not console.is_terminal:
        with _lines(text, of) as say:
            yield say
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    # Do not redirect standard output: results are written to it.
    with Progress(
        *columns, TextColumn(of.strip()), console=console, transient=True, redirect_stdout=False
    ) as bar:
        task = bar.add_task(text, total=None)
        yield lambda changed: bar.update(
            task, description=shortened(changed, console.width - _OTHERS - len(of))
        )


@contextmanager
def _lines(text: str, of: str) -> Iterator[Callable[[str], None]]:
    """Print the text at every interval until the work ends."""
    latest, ended, began = [text], Event(), time.monotonic()

    def print_lines() -> None:
        while not ended.wait(timeout=LINE_SECONDS):
            sys.stderr.write(f"{time.monotonic() - began:.0f} s{of}: {latest[0]}\n")
            sys.stderr.flush()

    printer = Thread(target=print_lines, daemon=True)
    printer.start()
    try:
        yield lambda changed: latest.__setitem__(0, changed)
    finally:
        ended.set()
        printer.join(timeout=LINE_SECONDS)


def shortened(text: str, width: int) -> str:
    """A text of at most ``width`` characters: without its last parts, or else its last words."""
    for mark in (", ", " "):
        while len(text) > width and mark in text:
            text = text.rpartition(mark)[0]
    return text
