"""One PostgreSQL server for a whole test session: see :class:`benchmarks.service.postgres.Server`.

All processes of a test session share one server. Each process holds a shared lock on a file while it lives.
A guard process waits for the exclusive lock, so it stops the server when the last of them has ended, even
if that one was killed.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.service.postgres import START_SECONDS, Server, a_server
from support.paths import ROOT, TESTS

__all__ = ["Server", "SharedServer", "a_server"]


class SharedServer:
    """This process's share in the one server of a test session.

    Parameters
    ----------
    place
        A folder that all processes of the session use.
    """

    def __init__(self, place: Path):
        self._address = place / "postgres"
        self._share = (place / "postgres.users").open("a")
        # A guard may hold the lock while it stops a server that had no users left.
        fcntl.flock(self._share, fcntl.LOCK_SH)
        with (place / "postgres.lock").open("a") as alone:
            fcntl.flock(alone, fcntl.LOCK_EX)
            if not self._address.exists():
                _start_guard(place)
        self.url = Server(Path(self._address.read_text())).url

    def close(self) -> None:
        """Release the share."""
        self._share.close()


def _start_guard(place: Path) -> None:
    """Start a guard that outlives this process, and wait until its server answers."""
    command = [sys.executable, "-m", "support.postgres", str(place)]
    with (place / "postgres.log").open("a") as log:
        ran = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, TESTS)))},
            start_new_session=True,
            timeout=2 * START_SECONDS,
            check=False,
        )
    if ran.returncode != 0:
        raise RuntimeError(f"no PostgreSQL server: {(place / 'postgres.log').read_text()}")


def guard(place: Path) -> None:
    """Run the shared server until no process has a share in it."""
    with a_server() as server, (place / "postgres.users").open("a") as users:
        _publish(place / "postgres", str(server.folder))
        fcntl.flock(users, fcntl.LOCK_EX)
        (place / "postgres").unlink(missing_ok=True)


def main(place: Path) -> int:
    """Fork a guard; return when it has published the address of its server, or has ended."""
    child = os.fork()
    if child == 0:
        guard(place)
        return 0
    while not (place / "postgres").exists():
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status) or 1
        time.sleep(0.02)
    return 0


def _publish(path: Path, text: str) -> None:
    whole = path.with_suffix(".new")
    whole.write_text(text)
    whole.rename(path)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
