"""A service process whose searches are fakes: ``python -m support.fake_service SEARCH DIRECTORY [FUNCTION]``.

Its database is in the directory. It prints its address when it listens. It kills itself instead of calling
the function with this dotted name.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import uvicorn
from zbv_service.app import create_app
from zbv_service.settings import Settings

from support.fake_kinds import kinds_of
from support.forked_ranks import SERVICES, ForkedProcess, fork_module
from support.processes import DEADLINE, wait_for_line

BACKLOG = 2048


@dataclass(frozen=True)
class FakeService:
    """A running process."""

    process: ForkedProcess
    address: str


@contextmanager
def fake_service(search: str, directory: Path, *dies_in: str) -> Iterator[FakeService]:
    """Run the service until the block ends or it would call ``dies_in``."""
    arguments, log = [search, str(directory), *dies_in], directory / "service.log"
    process = fork_module("support.fake_service", arguments, os.environ, log, SERVICES)
    try:
        yield FakeService(process, wait_for_line(process, log, r"(?m)^(http://\S+)$"))
    finally:
        process.kill()
        process.wait(DEADLINE)


def _serve(search: str, directory: Path, *dies_in: str) -> None:
    for name in dies_in:
        pytest.MonkeyPatch().setattr(name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    settings = Settings(auth="none", database=f"sqlite:///{directory}/zbv.db", searches=2)
    app = create_app(settings, kinds=kinds_of(search, directory))

    class AnnouncedServer(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            sys.stdout.write(f"http://127.0.0.1:{listener.getsockname()[1]}\n")
            sys.stdout.flush()

    # asyncio disables Nagle's algorithm only for sockets that name TCP.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(BACKLOG)
        AnnouncedServer(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


if __name__ == "__main__":
    _serve(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
