"""``zbv-service bench``: measure the service under load, beside its targets."""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from math import inf, nan
from typing import TYPE_CHECKING, Any

from zbv_service.commands.ending import DONE, FAILED, WRONG_INPUT, Stop
from zbv_service.commands.files import output

if TYPE_CHECKING:
    from benchmarks.service.findings import Finding

ALL = ("ranks", "queue", "stored", "fuzz", "streams")
NAMES = (*ALL, "heartbeats", "hostile", "page")
_TITLES = {
    "ranks": "Rank plans fetched over loopback",
    "queue": "A queue over SIGKILL",
    "stored": "An identical problem answered from the store",
    "fuzz": "Malformed bodies",
    "streams": "Idle event streams",
    "heartbeats": "Heartbeats of the agents of one run",
    "hostile": "The worst requests, each repeated by 16 clients",
    "page": "The page of a plan in a browser",
}


def add_bench(commands: Any) -> None:
    """Add the command."""
    bench = commands.add_parser(
        "bench",
        help="measure the service under load",
        description="Start a service of its own for each measurement, in a folder of its own, load it from "
        "another process, and print what was measured beside what was asked. Exit status 1 when a target is "
        "missed.",
    )
    bench.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"{', '.join(ALL)}, or all of these (the default); heartbeats, which needs PostgreSQL; hostile, "
        "which takes --seconds for every request; or page, which needs a browser",
    )
    bench.add_argument(
        "--seconds", type=_amount, default=10.0, metavar="S", help="of each measurement (default 10)"
    )
    bench.add_argument("--connections", type=_count, default=32, metavar="N", help="that fetch (default 32)")
    bench.add_argument(
        "--offered", type=_amount, default=1000.0, metavar="N", help="fetches per second beside a search"
    )
    bench.add_argument("--searches", type=_count, default=1000, metavar="N", help="that are queued")
    bench.add_argument("--bodies", type=_count, default=10_000, metavar="N", help="that are malformed")
    bench.add_argument("--streams", type=_count, default=1000, metavar="N", help="that are held open")
    bench.add_argument("--agents", type=_count, default=512, metavar="N", help="that beat (default 512)")
    bench.add_argument(
        "--database",
        metavar="URL",
        help="an empty database for heartbeats (default: a PostgreSQL server of its own)",
    )
    bench.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="TEXT",
        help="hostile requests with this in their names",
    )
    bench.add_argument("--seed", type=int, default=0, help="of the malformed bodies")
    bench.add_argument("-o", "--output", metavar="FILE", help="write the findings as JSON, too")
    bench.set_defaults(run=_bench)


def _bench(parsed: argparse.Namespace) -> int:
    from benchmarks.service.findings import print_table
    from benchmarks.service.served import NotStarted

    names = ALL if not parsed.names or parsed.names == ["all"] else tuple(parsed.names)
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise Stop(WRONG_INPUT, f"found {unknown[0]!r}; must be of {', '.join(NAMES)}, or all.")
    every: dict[str, list[Finding]] = {}
    with nullcontext() if parsed.output is None else output(parsed.output) as write:
        for name in names:
            try:
                every[name] = _measure(name, parsed)
            except NotStarted as error:
                raise Stop(FAILED, str(error)) from None
            print_table(_TITLES[name], every[name])
            if write is not None:  # after each: its findings are kept if the next fails
                document = {done: [found.document for found in findings] for done, findings in every.items()}
                write(json.dumps(document, indent=1) + "\n")
    return DONE if all(found.is_met for findings in every.values() for found in findings) else FAILED


def _measure(name: str, parsed: argparse.Namespace) -> list[Finding]:
    from benchmarks.service import fuzz, heartbeats, hostile, page, queue, ranks, stored, streams

    if name == "ranks":
        return ranks.measure(parsed.seconds, parsed.connections, parsed.offered)
    if name == "queue":
        return queue.measure(parsed.searches)
    if name == "stored":
        return stored.measure(parsed.seconds)
    if name == "fuzz":
        return fuzz.measure(parsed.bodies, parsed.seed)
    if name == "heartbeats":
        return heartbeats.measure(parsed.agents, parsed.seconds, parsed.database)
    if name == "hostile":
        return hostile.measure(parsed.seconds, parsed.only)
    if name == "page":
        return page.measure()
    return streams.measure(parsed.streams, parsed.seconds)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; must be a whole number of at least 1")
    return int(text)


def _amount(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = nan
    if not 0 < found < inf:
        raise argparse.ArgumentTypeError(f"found {text!r}; must be a number above 0")
    return found
