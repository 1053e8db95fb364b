"""Services in separate processes, with patient searches, and clients of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import NullPool, create_engine, text
from zbv_service.client import Client, Search
from zbv_service.settings import async_url

from support.forked_ranks import SERVICES, ForkedProcess, fork_module
from support.paths import TESTS
from support.processes import DEADLINE, is_alive, wait_for_line, wait_until
from support.serving import PROBLEM

PATH = os.pathsep.join(dict.fromkeys([str(TESTS), *filter(None, sys.path)]))
"""Where processes find these searches."""
SEARCHES_PRELOAD = "ZBV_TEST_PRELOAD"
"""Names the module that search processes import in place of the planner, which they do not need."""


@dataclass
class Served:
    """A service process and a client of it."""

    process: ForkedProcess
    address: str
    client: Client
    log: Path

    @property
    def children(self) -> list[int]:
        """The ids of all its descendants that still run."""
        return list(_below(self.process.pid))


def _below(process_id: int) -> Iterable[int]:
    for task in Path(f"/proc/{process_id}/task").glob("*/children"):
        for child in filter(is_alive, map(int, task.read_text().split())):
            yield child
            yield from _below(child)


def start_services(
    stack: ExitStack,
    folder: Path,
    count: int,
    *flags: str,
    variables: Mapping[str, str] = {},
    modules: tuple[str, ...] = SERVICES,
) -> list[Served]:
    """Start services with these flags and variables of the environment; the stack kills them.

    They are forked from a process that has imported ``modules``.
    """
    given = {"ZBV_DATABASE": f"sqlite:///{folder}/zbv.db", SEARCHES_PRELOAD: "support.patient_searches"}
    environment = {**os.environ, "PYTHONPATH": PATH, **given, **variables}
    command = ["serve", *(flags or ("--port", "0"))]
    starting = []
    for index in range(count):
        log = folder / f"service-{index}.log"
        process = fork_module("support.patient_searches", command, environment, log, modules)
        stack.callback(process.kill)
        starting.append((process, log))
    return [_listening(stack, *each) for each in starting]


def _listening(stack: ExitStack, process: ForkedProcess, log: Path) -> Served:
    address = wait_for_line(process, log, r"listening on (http://[^/\s]+)")
    return Served(process, address, stack.enter_context(Client(address, timeout=DEADLINE)), log)


def begun(client: Client, *, attempt: int = 1, search_id: str | None = None, **options: Any) -> Search:
    """A search, by default a new one, that has found a plan in this attempt and waits."""
    if search_id is None:
        asked = {"effort": "thorough", "time_limit": 600.0, "seed": 1, **options}
        search_id = client.submit(PROBLEM, asked).id
    known: str = search_id

    def has_found() -> bool:
        found = client.search(known)
        return (found.state, found.attempts) == ("running", attempt) and found.objective is not None

    wait_until(has_found, f"a plan of {known}")
    return client.search(known)


def stored(database: str, search_id: str, column: str) -> Any:
    """A value of a search in the database."""
    engine = create_engine(async_url(database), poolclass=NullPool)
    with engine.connect() as connection:
        query = text(f"SELECT {column} FROM searches WHERE id = :id")
        return connection.execute(query, {"id": search_id}).scalar_one()


def owner_of(database: str, search_id: str) -> int | None:
    """Process id of the service that has leased a search."""
    owner = stored(database, search_id, "lease_owner")
    return None if owner is None else int(owner.split(":")[1])
