"""The real application behind a real socket, in a thread of this process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from zbv_service.app import create_app
from zbv_service.commands.serving import config_of
from zbv_service.settings import Settings

from support.fake_kinds import kinds
from support.fake_searches import BY_NAME, InDirectory
from support.serving import DEADLINE

Command = Callable[..., tuple[int, str, str]]
"""Runs a command of the service; returns its status, standard output and standard error."""


@dataclass(frozen=True)
class Live:
    app: FastAPI
    address: str


@contextmanager
def live_service(folder: Path, search: str = "immediate", **settings: Any) -> Iterator[Live]:
    """A service without tokens, with its state in a folder, whose searches for plans are a fake."""
    chosen = Settings(auth="none", database=f"sqlite:///{folder}/zbv.db", **{"searches": 1, **settings})
    with listening(create_app(chosen, kinds=kinds(InDirectory(BY_NAME[search], folder)))) as live:
        yield live


@contextmanager
def listening(app: FastAPI) -> Iterator[Live]:
    """Serve an application on a free port until the block ends."""
    # asyncio disables Nagle's algorithm only for sockets that name TCP; otherwise each answer waits 40 ms.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        server = uvicorn.Server(config_of(app, app.state.settings))
        thread = threading.Thread(target=server.run, args=([listener],), name="zbv-live", daemon=True)
        thread.start()
        until = time.monotonic() + DEADLINE
        while not server.started:
            assert thread.is_alive(), "the service did not start; the log says why."
            assert time.monotonic() < until, "the service did not start in time."
            time.sleep(0.01)
        try:
            yield Live(app, f"http://127.0.0.1:{listener.getsockname()[1]}")
        finally:
            server.should_exit = True
            thread.join(DEADLINE)
            assert not thread.is_alive(), "the service did not stop."
