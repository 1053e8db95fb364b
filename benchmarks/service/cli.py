"""``python -m benchmarks service``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from zbv_worker.commands.arguments import positive, positive_number

from benchmarks.findings import Measure, WrongInput, add_output, measure_all

TITLES = {
    "ranks": "Rank plans fetched over the loopback interface",
    "queue": "A queue that survives SIGKILL",
    "heartbeats": "Heartbeats of the agents of one run",
    "hostile": "The most expensive requests, each repeated by 16 clients",
}
ALL = ("ranks", "queue")


def add_service(commands: Any) -> None:
    """Add the benchmarks of the service."""
    command = commands.add_parser(
        "service",
        help="measure the service under load",
        description="For each measurement, start a service in a temporary folder, load it from another "
        "process, and compare the measurements with targets.",
    )
    add = command.add_argument
    add(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"{' and '.join(ALL)} (the default, or all); heartbeats, which needs PostgreSQL; or hostile, "
        "which takes --seconds for every request",
    )
    for flag, kind, default, text in (
        ("--seconds", positive_number, 10.0, "duration of each measurement"),
        ("--connections", positive, 32, "ranks: concurrent connections"),
        ("--offered", positive_number, 1000.0, "ranks: requests per second"),
        ("--searches", positive, 1000, "queue: searches"),
        ("--agents", positive, 512, "heartbeats: agents"),
    ):
        metavar = "S" if flag == "--seconds" else "N"
        add(flag, type=kind, default=default, metavar=metavar, help=f"{text} (default: {default:g})")
    add(
        "--database",
        metavar="URL",
        help="heartbeats: an empty database (default: start a PostgreSQL server)",
    )
    add(
        "--only",
        action="append",
        default=[],
        metavar="TEXT",
        help="hostile: only requests with this text in their names; may be repeated",
    )
    add_output(command)
    command.set_defaults(run=_service)


def _service(parsed: argparse.Namespace) -> int:
    names: Sequence[str] = ALL if parsed.names in ([], ["all"]) else parsed.names
    for name in names:
        if name not in TITLES:
            raise WrongInput(f"found {name!r}; must be one of {', '.join(TITLES)}, or all.")
    return measure_all([(name, TITLES[name], _job(name, parsed)) for name in names], parsed.output)


def _job(name: str, parsed: argparse.Namespace) -> Measure:
    from benchmarks.service import agents, hostile, queue

    jobs: dict[str, Measure] = {
        "ranks": lambda: agents.measure_ranks(parsed.seconds, parsed.connections, parsed.offered),
        "queue": lambda: queue.measure(parsed.searches),
        "heartbeats": lambda: agents.measure_heartbeats(parsed.agents, parsed.seconds, parsed.database),
        "hostile": lambda: hostile.measure(parsed.seconds, parsed.only),
    }
    return jobs[name]
