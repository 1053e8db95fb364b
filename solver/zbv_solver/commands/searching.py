"""Searches of commands: a spinner shows the progress, and Ctrl-C ends them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zbv_solver.plans.plan import Plan
    from zbv_solver.problem.layered_problem import LayeredProblem
    from zbv_solver.problem.problem import Problem


def watched_search(
    problem: Problem | LayeredProblem,
    effort: str,
    time_limit: float | None,
    *,
    seed: int = 0,
    workers: int | None = None,
    keep: Callable[[Plan], None] | None = None,
) -> Plan:
    """The best plan of a problem, as :func:`zbv_solver.search.search.search` finds it.

    Parameters
    ----------
    keep
        Stores the plan. With it the first Ctrl-C ends the search early, and the best plan so far is stored
        and returned; Ctrl-C while it is being stored changes nothing. Without it Ctrl-C raises
        KeyboardInterrupt.
    """
    from zbv_solver.commands.interrupt import interruptible
    from zbv_solver.search.search import SearchOptions, search

    threads = useful_workers() if workers is None else workers
    options = SearchOptions(effort=effort, time_limit=time_limit, seed=seed, workers=threads)  # type: ignore[arg-type]  # argparse restricts it to the literals
    with spinner("searching") as say:

        def report(found: Any) -> None:
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
    """A text on standard error while something runs, where someone may be looking; yields what changes it."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    # Results go to standard output untouched, also while the spinner turns.
    with Progress(
        *columns, console=console, transient=True, redirect_stdout=False, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(text, total=None)
        yield lambda changed: bar.update(task, description=changed)


def useful_workers() -> int:
    """How many threads a search makes use of: it runs two chains."""
    return min(2, os.cpu_count() or 1)
