"""``zbv-service submit``: have a service plan a problem, follow the search, and write the plan."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from typing import TYPE_CHECKING, Any

from zbv_service.client.flags import add_server
from zbv_service.commands.ending import DONE, EPILOG, FAILED, INFEASIBLE, Stop
from zbv_service.commands.files import output, read_json, require_finite
from zbv_service.commands.refusals import stop_of
from zbv_service.commands.search_progress import SearchProgress, found_text

if TYPE_CHECKING:
    from zbv_service.client import Client, Search


def add_submit(commands: Any) -> None:
    """Add the command."""
    submit = commands.add_parser(
        "submit",
        help="have a service plan a problem",
        description="Submit a problem to a running service, follow the search, and write the plan. Ctrl-C\n"
        "ends the search and keeps the best plan found; pressed again, it leaves at once, and\n"
        "the service ends the search by itself.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    submit.add_argument("problem", help="problem file (JSON); - is standard input")
    add_server(submit)
    submit.add_argument(
        "-o", "--output", default="-", metavar="FILE", help="where to write the plan (default: -)"
    )
    submit.add_argument(
        "--effort",
        choices=("quick", "standard", "thorough"),
        default="standard",
        help="how hard to search (default: standard)",
    )
    submit.add_argument("--time-limit", type=float, metavar="SECONDS", help="stop the search after this long")
    submit.add_argument("--seed", type=int, default=0, metavar="N", help="of the search (default: 0)")
    submit.add_argument(
        "--detach", action="store_true", help="print the search's id and leave it to the service"
    )
    submit.add_argument("-q", "--quiet", action="store_true", help="say nothing but errors")
    submit.set_defaults(run=_submit)


def _submit(parsed: argparse.Namespace) -> int:
    from zbv_service.client import Client, ClientError, InvalidRequest, SearchEnded

    problem = read_json(parsed.problem)
    options = {"effort": parsed.effort, "time_limit": parsed.time_limit, "seed": parsed.seed}
    require_finite(problem, options)
    try:
        with output(parsed.output) as write, Client(parsed.server) as client:
            search = client.submit(problem, options)
            if parsed.detach:
                print(search.id)
                return DONE
            found = _follow(client, search, is_quiet=parsed.quiet)
            document = client.plan_document(str(found.plan_id))
            write(json.dumps(document, ensure_ascii=False) + "\n")
    except InvalidRequest as error:
        raise stop_of(error, parsed.problem) from None
    except SearchEnded as ended:
        status = INFEASIBLE if ended.search.state == "infeasible" else FAILED
        raise Stop(status, str(ended)) from None
    except ClientError as error:
        raise Stop(FAILED, str(error)) from None
    return DONE


def _follow(client: Client, search: Search, *, is_quiet: bool) -> Search:
    """Show a search until it has ended, and cancel it on Ctrl-C; raises what waiting raises."""
    with SearchProgress(search, is_quiet=is_quiet) as progress:
        try:
            found = client.wait(search.id, progress.show)
        except KeyboardInterrupt:
            found = _cancel(client, search.id, progress)
    if not is_quiet:
        address = f"{client.base_url}/plans/{found.plan_id}"
        print(f"plan {found.plan_id}: {found_text(found)}; {address}", file=sys.stderr)
    return found


def _cancel(client: Client, search_id: str, progress: SearchProgress) -> Search:
    progress.say("ending the search; the best plan found so far is kept. Ctrl-C again leaves at once.")
    try:
        client.cancel(search_id)
        return client.wait(search_id, progress.show)
    except KeyboardInterrupt:
        raise Stop(
            128 + signal.SIGINT,
            f"left search {search_id}, which ends by itself; its plan: GET {client.base_url}/v1/searches/"
            f"{search_id}",
        ) from None
