"""A PostgreSQL server in a folder, without a port, and one that a whole test session shares.

All processes of a test session share one server. Each process holds a shared lock on a file while it lives.
A guard process waits for the exclusive lock, so it stops the server when the last of them has ended, even
if that one was killed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.paths import ROOT, TESTS

START_SECONDS = 120
SERVER_USER = "postgres"
"""The account that runs the server when we are root, because PostgreSQL refuses to run as root."""
SETTINGS = {
    "listen_addresses": "''",
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "on",  # tests stop it abruptly, and committed data must survive
    "max_connections": "200",
    "shared_buffers": "32MB",
    "autovacuum": "off",
    "wal_level": "minimal",
    "max_wal_senders": "0",
}


class Server:
    """A PostgreSQL server in a folder. :meth:`create` makes it; it can be started and stopped repeatedly."""

    def __init__(self, folder: Path):
        self.folder = folder

    @property
    def url(self) -> str:
        """URL of its first database, for a user that may create others."""
        return f"postgresql://{SERVER_USER}@/postgres?host={self.folder}"

    def create(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if os.geteuid() == 0:
            shutil.chown(self.folder, SERVER_USER, SERVER_USER)
        options = ["--no-sync", "--auth=trust", "--encoding=UTF8", "--locale=C", f"--username={SERVER_USER}"]
        self._run("initdb", *options, "--pgdata", str(self.folder / "data"))

    def start(self) -> None:
        """Start, and wait until it accepts connections."""
        options = " ".join(f"-c {name}={value}" for name, value in SETTINGS.items())
        options += f" -c unix_socket_directories={self.folder}"
        log, wait = str(self.folder / "log"), ["-w", "-t", str(START_SECONDS)]
        self._run("pg_ctl", "start", "-D", str(self.folder / "data"), "-l", log, "-o", options, *wait)

    def stop(self) -> None:
        self._run("pg_ctl", "stop", "-D", str(self.folder / "data"), "-m", "immediate", "-w")

    def _run(self, program: str, *arguments: str) -> None:
        as_whom = {"user": SERVER_USER, "group": SERVER_USER, "extra_groups": []} if os.geteuid() == 0 else {}
        # Into a file: a server that inherits a pipe would hold it open forever.
        with tempfile.TemporaryFile() as output:
            ran = subprocess.run(  # type: ignore[call-overload]
                [_binaries() / program, *arguments],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=2 * START_SECONDS,
                check=False,
                **as_whom,
            )
            output.seek(0)
            text = output.read().decode(errors="replace")
        if ran.returncode != 0:
            raise RuntimeError(f"{program} ended with status {ran.returncode}:\n{text}")


def _binaries() -> Path:
    found = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parent.parent.name)
    )
    if not found:
        raise RuntimeError("found no PostgreSQL server below /usr/lib/postgresql. Run: make postgres")
    return found[-1].parent


@contextmanager
def a_server() -> Iterator[Server]:
    """Run a new server during the block, which may stop it."""
    # a short path, because socket paths have a length limit
    folder = Path(tempfile.mkdtemp(prefix="zbv-pg-"))
    server = Server(folder)
    try:
        server.create()
        server.start()
        yield server
    finally:
        if (folder / "data/postmaster.pid").exists():
            server.stop()
        shutil.rmtree(folder)


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
