"""``zbv-service submit``: let a service plan a problem, follow the search, and write the plan."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from zbv_service.client.flags import add_server
from zbv_service.commands.arguments import finite, flag_of
from zbv_service.commands.connection import connected, refused
from zbv_service.commands.ending import DONE, EPILOG, FAILED, INFEASIBLE, INTERRUPTED, Stop
from zbv_service.commands.files import output, read_problem
from zbv_service.commands.search_progress import SearchProgress, summary

if TYPE_CHECKING:
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
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    submit.add_argument("problem", help="problem file (JSON); - is standard input")
    add_server(submit)
    submit.add_argument(
        "-o",
        "--output",
        default="-",
        metavar="FILE",
        help="where to write the plan (default: standard output)",
    )
    add_effort(submit, default="standard")
    submit.add_argument("--time-limit", type=finite, metavar="SECONDS", help="end the search after this time")
    submit.add_argument(
        "--seed", type=int, default=0, metavar="N", help="random seed of the search (default: 0)"
    )
    submit.add_argument("--detach", action="store_true", help="print the search's id and exit")
    submit.add_argument("-q", "--quiet", action="store_true", help="print errors only")
    submit.set_defaults(run=_submit)


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
    from zbv_service.client import InvalidRequest, SearchEnded

    problem = read_problem(parsed.problem)
    options = {"effort": parsed.effort, "time_limit": parsed.time_limit, "seed": parsed.seed}
    sources = {f"/options/{name}": flag_of(name) for name in options}
    with output(parsed.output) as write, connected(parsed.server) as client:
        try:
            search = client.submit(problem, options)
        except InvalidRequest as error:
            raise refused(error, {"/problem": parsed.problem, **sources}) from None
        if parsed.detach:
            print(search.id)
            return DONE
        try:
            found = follow(client, search, "plan", is_quiet=parsed.quiet)
        except SearchEnded as ended:
            raise no_result(ended) from None
        if not parsed.quiet:
            address = f"{client.base_url}/plans/{found.plan_id}"
            print(f"plan {found.plan_id}: {summary(found)}; {address}", file=sys.stderr)
        document = client.plan_document(str(found.plan_id))
        write(json.dumps(document, ensure_ascii=False) + "\n")
    return INTERRUPTED if found.state == "cancelled" else DONE


def no_result(ended: SearchEnded) -> Stop:
    """How a command ends whose search ended without a result."""
    return Stop(INFEASIBLE if ended.search.state == "infeasible" else FAILED, str(ended))


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
