"""``zbv-service submit``: let a service plan a problem, follow the search, and write the plan."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from zbv_service.client.flags import add_server
from zbv_service.commands.arguments import (
    DONE,
    EPILOG,
    FAILED,
    INFEASIBLE,
    INTERRUPTED,
    Stop,
    connected,
    finite,
    flag_of,
    output,
    read_problem,
    refused,
)

if TYPE_CHECKING:
    from zbv_solver.problem.problem import Units

    from zbv_service.client import Client, Search, SearchEnded

_EXAMPLES = """\
examples:
  zbv-service submit problem.json -o plan.json
  zbv-service submit problem.json --effort thorough --time-limit 600 -o plan.json
  zbv-service submit problem.json --detach --server http://planner:8000

"""


def add_submit(commands: Any) -> None:
    """Add the command."""
    submit = commands.add_parser(
        "submit",
        help="let a service plan a problem",
        description="Submit a problem to a running service, follow the search, and write the plan.\n"
        "Ctrl-C ends the search and writes the best plan found. A second Ctrl-C leaves at once;\n"
        "the service then ends the search on its own.",
        epilog=_EXAMPLES + EPILOG,
    )
    submit.add_argument("problem", help="problem file (JSON); - is standard input")
    add_server(submit)
    add_ending(submit, "the plan")
    add_effort(submit, default="standard")
    submit.add_argument("--time-limit", type=finite, metavar="SECONDS", help="end the search after this time")
    submit.add_argument(
        "--seed", type=int, default=0, metavar="N", help="random seed of the search (default: 0)"
    )
    submit.set_defaults(run=_submit)


def add_ending(command: argparse.ArgumentParser, what: str) -> None:
    """Add the flags of :func:`search_to_end`."""
    command.add_argument(
        "-o",
        "--output",
        default="-",
        metavar="FILE",
        help=f"where to write {what} (default: standard output)",
    )
    command.add_argument("--name", help="name of the search in lists and pages; replaces an earlier one")
    command.add_argument("--detach", action="store_true", help="print the search's id and exit")
    command.add_argument("-q", "--quiet", action="store_true", help="print errors only")


def add_effort(command: Any, default: str | None) -> None:
    """Add ``--effort``."""
    command.add_argument(
        "--effort",
        choices=("quick", "standard", "thorough"),
        default=default,
        help="how hard to search: quick mostly constructs schedules, standard also improves them, and "
        "thorough does about ten times the work of standard (default: standard)",
    )


def _submit(parsed: argparse.Namespace) -> int:
    problem = read_problem(parsed.problem)
    options = {"effort": parsed.effort, "time_limit": parsed.time_limit, "seed": parsed.seed}
    sources = {"/name": "--name", "/problem": parsed.problem}
    sources |= {f"/options/{name}": flag_of(name) for name in options}

    def submit(client: Client) -> Search:
        return client.submit(problem, options, name=parsed.name)

    def document(client: Client, found: Search) -> Any:
        return client.plan_document(str(found.plan_id))

    return search_to_end(parsed, submit, sources, "plan", document)


def search_to_end(
    parsed: argparse.Namespace,
    submit: Callable[[Client], Search],
    sources: Mapping[str, str],
    what: str,
    document: Callable[[Client, Search], Any],
) -> int:
    """Submit a search, follow it, and write its result; returns the exit status.

    Parameters
    ----------
    sources
        For :func:`.refused`.
    what
        What is kept after Ctrl-C.
    document
        The document to write of an ended search.
    """
    from zbv_service.client import InvalidRequest, SearchEnded

    with output(parsed.output) as write, connected(parsed.server) as client:
        try:
            search = submit(client)
        except InvalidRequest as error:
            raise refused(error, sources) from None
        if parsed.detach:
            print(search.id)
            return DONE
        try:
            found = follow(client, search, what, is_quiet=parsed.quiet)
        except SearchEnded as ended:
            raise ended_without(ended) from None
        text = json.dumps(document(client, found), ensure_ascii=False)
        if not parsed.quiet:
            print_result(client, found)
        write(f"{text}\n")
    return INTERRUPTED if found.state == "cancelled" else DONE


def ended_without(ended: SearchEnded) -> Stop:
    """How a command ends after a search without a plan."""
    return Stop(INFEASIBLE if ended.search.state == "infeasible" else FAILED, str(ended))


def print_result(client: Client, search: Search) -> None:
    """Print what an ended search has found, and where its plan is."""
    plan = f"{client.base_url}/plans/{search.plan_id}"
    print(f"plan {search.plan_id}: {summary(search)}; {plan}", file=sys.stderr)


def follow(client: Client, search: Search, what: str, *, is_quiet: bool) -> Search:
    """Show a search until it ends, and cancel it on Ctrl-C; raises as :meth:`Client.wait` does.

    ``what`` is kept after Ctrl-C.
    """
    with SearchProgress(search, is_quiet=is_quiet) as progress:
        try:
            return client.wait(search.id, progress.show)
        except KeyboardInterrupt:
            progress.say(
                f"ending the search and keeping the best {what} found; press Ctrl-C again to leave at once."
            )
        try:
            client.cancel(search.id)
            return client.wait(search.id, progress.show)
        except KeyboardInterrupt:
            raise Stop(
                INTERRUPTED, f"left search {search.id}, which ends on its own and keeps its best {what}."
            ) from None


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
        if known := summary(search):
            text += f", {known}"
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

    units = quantities.stated(units_of(search))
    parts = [] if search.objective is None else [f"objective {quantities.time(search.objective, units)}"]
    if search.lower_bound is not None:
        parts.append(f"bound {quantities.time(search.lower_bound, units)}")
    if search.gap is not None:
        parts.append(f"gap {quantities.percent(search.gap)}")
    if search.method:
        parts.append(search.method)
    if (counts := search.progress) is not None:
        parts.append(f"{counts['ruled_out'] + counts['planned']} of {counts['considered']} layouts examined")
    return ", ".join(parts)


def units_of(search: Search) -> Units:
    """The unit of a search's times: seconds for the steps of layouts, else that of its problem."""
    from zbv_solver.problem.problem import Units

    return Units(time="s" if search.kind == "layouts" else search.summary.get("time_unit"))
