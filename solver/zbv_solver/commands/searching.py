"""Searches of commands: options from flags, a progress display, and Ctrl-C."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from rich.console import Console
from rich.progress import Progress as ProgressBar
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from zbv_solver.commands.interrupt import interruptible
from zbv_solver.commands.messages import named_flags
from zbv_solver.errors import InvalidInput
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.layered_problem import AnyProblem
from zbv_solver.search.incumbent import Progress
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search


def search_options(arguments: argparse.Namespace) -> SearchOptions:
    """The options of a search; raises :class:`InvalidInput` naming the wrong flags."""
    try:
        return SearchOptions(
            effort=arguments.effort,
            time_limit=arguments.time_limit,
            seed=arguments.seed,
            workers=arguments.workers,
        )
    except InvalidInput as error:
        raise named_flags(error) from None


def watched_search(
    problem: AnyProblem,
    options: SearchOptions,
    keep: Callable[[Plan], None] | None = None,
    search: Callable[..., Plan] = search,
) -> Plan:
    """Search with a progress display on standard error.

    Parameters
    ----------
    search
        :func:`zbv_solver.search.run.search`, or what takes the same arguments.
    keep
        Stores the plan. With it, the first Ctrl-C ends the search early, and the best plan so far is stored
        and returned; Ctrl-C while it is being stored has no effect. Without it, Ctrl-C raises
        KeyboardInterrupt.
    """
    with spinner("searching") as say:

        def report(found: Progress) -> None:
            say(f"{problem.objective} {found.objective:.6g}, gap {found.gap:.2%} ({found.method})")

        def work(stop: Callable[[], bool]) -> Plan:
            plan = search(problem, options, on_progress=report, cancelled=stop)
            if keep is not None:
                keep(plan)
            return plan

        ending = partial(say, "interrupted; storing the best plan so far")
        return interruptible(work, None if keep is None else ending)


@contextmanager
def spinner(text: str) -> Iterator[Callable[[str], None]]:
    """Show a text on standard error, if that is a terminal; yields the function that changes the text."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    # Do not redirect standard output: results are written to it.
    with ProgressBar(
        *columns, console=console, transient=True, redirect_stdout=False, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(text, total=None)
        yield lambda changed: bar.update(task, description=changed)
