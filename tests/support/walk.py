"""Counts the functions of the service that a request passes through; as a program, it lists them.

``PYTHONPATH=tests python -m support.walk`` walks from ``POST /v1/searches`` through the search to the fetch
of a rank, in this process over ASGI; ``support.walk tokens`` does so with a token. What the process of the
search runs is not counted, nor what a service does at intervals: it renews leases, and looks for requests to
stop, runs and old rows, and at its memory.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import CO_NEWLOCALS, CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import httpx
import zbv_service
from zbv_service.app import create_app
from zbv_service.compute import computations
from zbv_service.settings import Settings

from support.fake_kinds import kinds_of
from support.serving import DEADLINE, Service
from support.tokens import add

PACKAGE = str(Path(zbv_service.__file__).parent)
PIECES = ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>", "<lambda>")
"""Comprehensions and lambdas belong to the function that they are in."""
AT_INTERVALS = ("zbv-leases", "zbv-requests to stop")
"""The tasks that are not counted."""
FETCH = "fetch of a rank"
"""The part that fetches a rank from memory."""
REPEATED = [f"fetch {number}" for number in range(5)]


class Function(NamedTuple):
    """A function of the service."""

    module: str
    line: int
    name: str


class Walk:
    """Notes the functions of the service that any thread of this process calls, by part of the walk."""

    def __init__(self) -> None:
        self.parts: dict[str, set[Function]] = {}
        self._calls: set[CodeType] | None = None

    @property
    def whole(self) -> set[Function]:
        """The functions of all parts."""
        return set().union(*self.parts.values())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within the block, parts can be noted; threads that start in it are seen too."""
        before = sys.getprofile()
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(before)
            threading.setprofile(None)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Note the functions that are called within the block."""
        self._calls = calls = set[CodeType]()
        try:
            yield
        finally:
            self._calls = None
            self.parts[name] = {_function(code) for code in calls if _is_counted(code)}

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        calls = self._calls
        if event == "call" and calls is not None:
            loop = asyncio._get_running_loop()  # None in the other threads
            task = None if loop is None else asyncio.current_task(loop)
            if task is None or task.get_name() not in AT_INTERVALS:
                calls.add(frame.f_code)


def _is_counted(code: CodeType) -> bool:
    # The bodies of modules and classes lack these flags.
    is_function = bool(code.co_flags & CO_OPTIMIZED and code.co_flags & CO_NEWLOCALS)
    return is_function and code.co_filename.startswith(PACKAGE) and code.co_name not in PIECES


def _function(code: CodeType) -> Function:
    module = Path(code.co_filename).relative_to(PACKAGE).as_posix()
    return Function(module, code.co_firstlineno, code.co_qualname)


def modules(functions: set[Function]) -> list[str]:
    """The modules of functions."""
    return sorted({function.module for function in functions})


async def walk(place: Path, auth: Literal["tokens", "none"] = "none") -> Walk:
    """Submit a search, follow it to its end, and fetch a rank twice; ``tokens``: with one of the database."""
    walk = Walk()
    settings = Settings(database=f"sqlite:///{place}/zbv.db", allowed_hosts=("zbv",), searches=1, auth=auth)
    with walk.watching(), patch.object(computations, "LOOK_SECONDS", DEADLINE):
        app = create_app(settings, kinds=kinds_of("honest", place))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        client = httpx.AsyncClient(transport=transport, base_url="http://zbv", timeout=DEADLINE)
        async with app.router.lifespan_context(app), client as http:
            state, service = app.state.application, Service(app, http)
            if auth == "tokens":
                http.headers.update(await add(service, "read", "search"))
            await state.dispatcher.stop()
            await state.sweeper.stop()
            # Builds the middleware, and opens a connection in each thread that reads.
            await asyncio.gather(*(http.get("/v1/plans") for _ in range(8)))
            with walk.part("POST"):
                search_id = (await service.submit()).json()["id"]
            with walk.part("search"):
                plan_id = (await service.ended(search_id))["plan_id"]
            for fetch in ("first fetch of a rank", *REPEATED):
                with walk.part(fetch):
                    answer = await http.get(f"/v1/plans/{plan_id}/ranks/0")
                    assert answer.status_code == 200, answer.text
            # Loops of the runner may work during a fetch, too.
            walk.parts[FETCH] = min((walk.parts.pop(name) for name in REPEATED), key=len)
    return walk


def listing(done: Walk) -> Iterator[str]:
    """The counts, and the functions by module with the parts that call them."""
    for name, functions in {**done.parts, "whole walk": done.whole}.items():
        yield f"{name}: {len(functions)} functions in {len(modules(functions))} modules"
    for module in modules(done.whole):
        yield module
        for function in sorted(function for function in done.whole if function.module == module):
            parts = [name for name, functions in done.parts.items() if function in functions]
            yield f"    {function.name} ({', '.join(parts)})"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        done = asyncio.run(walk(Path(folder), "tokens" if "tokens" in sys.argv else "none"))
        sys.stdout.writelines(f"{line}\n" for line in listing(done))
