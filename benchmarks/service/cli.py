"""``python -m benchmarks service``."""

from __future__ import annotations

import argparse
from functools import partial
from importlib import import_module
from typing import Any

from zbv_worker.commands.arguments import positive, positive_number

from benchmarks.findings import add_output, measure_all

ALL = ("ranks", "queue", "stored", "fuzz", "streams")
TITLES = {
    "ranks": "Rank plans fetched over the loopback interface",
    "queue": "A queue that survives SIGKILL",
    "stored": "A known problem, answered from the database",
    "fuzz": "Malformed bodies",
    "streams": "Idle event streams",
    "heartbeats": "Heartbeats of the agents of one run",
    "hostile": "The most expensive requests, each repeated by 16 clients",
    "page": "A plan's page in a browser",
}


def add_service(commands: Any) -> None:
    """Add the benchmarks of the service."""
    command = commands.add_parser(
        "service",
        help="measure the service under load",
        description="For each measurement, start a service in a temporary folder, load it from another "
        "process, and compare the measurements with targets.",
    )
    command.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"{', '.join(ALL)}, or all of these (the default); heartbeats, which needs PostgreSQL; hostile, "
        "which takes --seconds for every request; or page, which needs a browser",
    )
    command.add_argument(
        "--seconds",
        type=positive_number,
        default=10.0,
        metavar="S",
        help="duration of each measurement (default: 10)",
    )
    command.add_argument(
        "--connections",
        type=positive,
        default=32,
        metavar="N",
        help="ranks: concurrent connections (default: 32)",
    )
    command.add_argument(
        "--offered",
        type=positive_number,
        default=1000.0,
        metavar="N",
        help="ranks: requests per second while a search runs (default: 1000)",
    )
    command.add_argument(
        "--searches", type=positive, default=1000, metavar="N", help="queue: searches (default: 1000)"
    )
    command.add_argument(
        "--bodies", type=positive, default=10_000, metavar="N", help="fuzz: bodies (default: 10000)"
    )
    command.add_argument("--seed", type=int, default=0, metavar="N", help="fuzz: seed (default: 0)")
    command.add_argument(
        "--streams", type=positive, default=1000, metavar="N", help="streams: open streams (default: 1000)"
    )
    command.add_argument(
        "--agents", type=positive, default=512, metavar="N", help="heartbeats: agents (default: 512)"
    )
    command.add_argument(
        "--database",
        metavar="URL",
        help="heartbeats: an empty database (default: start a PostgreSQL server)",
    )
    command.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="TEXT",
        help="hostile: only requests with this text in their names; may be repeated",
    )
    add_output(command)
    command.set_defaults(run=_service)


def _service(parsed: argparse.Namespace) -> int:
    from benchmarks.findings import WrongInput

    names = ALL if parsed.names in ([], ["all"]) else tuple(parsed.names)
    for name in names:
        if name not in TITLES:
            raise WrongInput(f"found {name!r}; must be one of {', '.join(TITLES)}, or all.")
    options: dict[str, tuple[Any, ...]] = {
        "ranks": (parsed.seconds, parsed.connections, parsed.offered),
        "queue": (parsed.searches,),
        "stored": (parsed.seconds,),
        "fuzz": (parsed.bodies, parsed.seed),
        "streams": (parsed.streams, parsed.seconds),
        "heartbeats": (parsed.agents, parsed.seconds, parsed.database),
        "hostile": (parsed.seconds, parsed.only),
        "page": (),
    }
    jobs = [
        (name, TITLES[name], partial(import_module(f"benchmarks.service.{name}").measure, *options[name]))
        for name in names
    ]
    return measure_all(jobs, parsed.output)
