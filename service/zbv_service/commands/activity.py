"""``zbv-service searches``, ``runs``, ``follow`` and ``cancel``: what a service does, and how to stop it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from zbv_service.client.flags import add_server
from zbv_service.commands.arguments import (
    DONE,
    EPILOG,
    FAILED,
    INTERRUPTED,
    Stop,
    WrongInput,
    at_least_one,
    connected,
    output,
    print_table,
    refused,
)
from zbv_service.commands.run import follow_or_leave, last_step, ways_to_cancel
from zbv_service.commands.submit import SearchProgress, ended_without, print_result, units_of

if TYPE_CHECKING:
    from zbv_service.client import Client, Run, Search

_ID = 12
"""Characters of an id in a table, as on the pages."""
_MOST_FOUND = 1000
"""The most that one request lists."""
_FOLLOW_EPILOG = """\
exit status: 0 the search has a plan, or the run succeeded; 1 it failed or was cancelled, or the service
cannot be reached; 2 the input is wrong; 3 no plan fits the memory limit; 130 interrupted, and the search or
run continues."""


def add_activity(commands: Any) -> None:
    """Add the commands."""
    for noun, states in (
        ("searches", "queued, running, done, cancelled, failed or infeasible"),
        ("runs", "planning, waiting, starting, running, succeeded, failed or cancelled"),
    ):
        listing = commands.add_parser(
            noun,
            help=f"list the {noun} of a service",
            description=f"List the {noun} of a service, the newest first: a table on a terminal, else JSON.",
            epilog=EPILOG,
        )
        listing.add_argument(
            "--limit", type=at_least_one, default=20, metavar="N", help="how many to list (default: 20)"
        )
        listing.add_argument(
            "--state", action="append", metavar="STATE", help=f"only those that are {states}; may be repeated"
        )
        listing.add_argument(
            "--find", metavar="TEXT", help="only those whose name contains this, or whose id begins with it"
        )
        listing.add_argument("--json", action="store_true", help="print JSON on a terminal, too")
        add_server(listing)
        listing.set_defaults(run=partial(_list, noun))
    for verb, more, epilog, run in (
        ("follow", "until it ends. Ctrl-C ends only the command.", _FOLLOW_EPILOG, _follow),
        ("cancel", "of a service. A search keeps its best plan.", EPILOG, _cancel),
    ):
        command = commands.add_parser(
            verb,
            help=f"{verb} a search or run of a service",
            description=f"{verb.capitalize()} a search or run {more}",
            epilog=epilog,
        )
        command.add_argument("id", metavar="ID", help="its id, the beginning of its id, or its name")
        if verb == "follow":
            command.add_argument(
                "-o", "--output", metavar="FILE", help="where to write the plan, or the layouts, of a search"
            )
        add_server(command)
        command.set_defaults(run=run)


def _list(noun: str, parsed: argparse.Namespace) -> int:
    from zbv_service.client import InvalidRequest

    sources = {"limit": "--limit", "q": "--find"}
    sources |= {f"state.{index}": "--state" for index, _ in enumerate(parsed.state or ())}
    filters = {"limit": parsed.limit, "state": parsed.state, "q": parsed.find}
    with connected(parsed.server) as client:
        try:
            found: Any = getattr(client, noun)(**filters)
        except InvalidRequest as error:
            raise refused(error, sources) from None
    if parsed.json or not sys.stdout.isatty():
        documents = [asdict(each) if noun == "searches" else each.document for each in found]
        print(json.dumps({noun: documents}, ensure_ascii=False, default=datetime.isoformat))
    elif noun == "searches":
        print_table(("ID", "NAME", "STATE", "SHAPE", "BEST", "GAP", "SUBMITTED"), map(_search_row, found))
    else:
        print_table(("ID", "NAME", "STATE", "STEP", "MODEL OR SCRIPT", "SUBMITTED"), map(_run_row, found))
    if len(found) == parsed.limit:
        print(f"zbv-service: these are the newest {parsed.limit}; --limit lists more.", file=sys.stderr)
    return DONE


def _search_row(search: Search) -> Iterator[str]:
    from zbv_solver.export import quantities

    summary = search.summary
    yield from (search.id[:_ID], search.name or "-", search.state)
    is_plan = search.kind == "plan"
    yield (
        f"{summary['pp_degree']} × {summary['microbatches']}" if is_plan else f"{summary['devices']} devices"
    )
    yield "-" if search.objective is None else quantities.time(search.objective, units_of(search))
    yield "-" if search.gap is None else quantities.percent(search.gap)
    yield quantities.ago(search.created_at)


def _run_row(run: Run) -> Iterator[str]:
    from zbv_solver.export import quantities

    document = run.document
    step = document["steps"] if run.state == "succeeded" else last_step(run)
    of_all = "" if document["steps"] is None else f" of {document['steps']}"
    program = document["model"]["factory"] if document["model"] else document["script"]["path"]
    yield from (run.id[:_ID], run.name or "-", run.state)
    yield from (f"{'-' if step is None else step}{of_all}", program)
    yield quantities.ago(datetime.fromisoformat(document["created_at"]))


def _follow(parsed: argparse.Namespace) -> int:
    from zbv_service.client import Run, SearchEnded

    with connected(parsed.server) as client:
        found = _find(client, parsed.id)
        if isinstance(found, Run):
            if parsed.output is not None:
                raise WrongInput(f"--output: {found.id} is a run; only searches have a plan to write.")
            return follow_or_leave(client, found, cancels=False)
        with SearchProgress(found) as progress, ExitStack() as stack:
            write = None if parsed.output is None else stack.enter_context(output(parsed.output))
            try:
                ended = client.wait(found.id, progress.show)
            except SearchEnded as error:
                raise ended_without(error) from None
            except KeyboardInterrupt:
                progress.say(f"search {found.id} continues. {ways_to_cancel(client, found.id)}")
                return INTERRUPTED
            if write is not None:
                document = ended.answer if ended.kind != "plan" else client.plan_document(str(ended.plan_id))
                write(f"{json.dumps(document, ensure_ascii=False)}\n")
        print_result(client, ended)
    return DONE


def _cancel(parsed: argparse.Namespace) -> int:
    from zbv_service.client import Run

    with connected(parsed.server) as client:
        found = _find(client, parsed.id)
        name = f"{_noun(found)} {found.id}"
        if not found.is_finished:
            now = client.cancel_run(found.id) if isinstance(found, Run) else client.cancel(found.id)
            if not now.is_finished or now.state == "cancelled":
                print(f"{name} is {'cancelled' if now.is_finished else 'stopping'}.", file=sys.stderr)
                return DONE
            found = now  # it has ended in the meantime
    raise Stop(FAILED, f"{name} has ended already: it is {found.state}.")


def _find(client: Client, given: str) -> Search | Run:
    """The search or run with an id, a beginning of an id, or a name; raises :class:`WrongInput`."""
    from zbv_service.client import Run

    known: list[Search | Run] = []
    if given:  # an empty text would find all
        known += client.searches(_MOST_FOUND, q=given)
        known += client.runs(_MOST_FOUND, q=given)
    found = [each for each in known if each.name == given or each.id.startswith(given.lower())]
    # A run's name is also that of the search that plans it.
    planning = {each.document.get("search_id") for each in found if isinstance(each, Run)}
    found = [each for each in found if each.id not in planning]
    if not found:
        raise WrongInput(
            f"found no search or run {given!r}. To list them: zbv-service searches, zbv-service runs"
        )
    if len(found) > 1:
        some = ", ".join(f"{_noun(each)} {each.id} ({each.state})" for each in found[:5])
        raise WrongInput(
            f"{given!r} matches {len(found)} searches and runs: {some}{', …' * (len(found) > 5)}. Give a "
            f"whole id."
        )
    return found[0]


def _noun(found: Search | Run) -> str:
    from zbv_service.client import Run

    return "run" if isinstance(found, Run) else "search"
