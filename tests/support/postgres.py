"""A real PostgreSQL server for the tests: Debian's binaries, a folder of its own, a socket and no port.

All processes of a test session share one server. Each holds a shared lock on a file for as long as it
lives; a guard, which is a process of its own, waits for the exclusive one, and so ends the server when the
last of them has ended, however it did.
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

START_SECONDS = 60
SERVER_USER = "postgres"
"""Whom the server runs as when the tests are root, as whom PostgreSQL refuses to run."""
SETTINGS = {
    "listen_addresses": "''",
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "on",  # tests stop it without a warning, and what it accepted must be there
    "max_connections": "200",
    "shared_buffers": "32MB",
    "autovacuum": "off",
    "wal_level": "minimal",
    "max_wal_senders": "0",
}


class Server:
    """A PostgreSQL server in a folder: made by :meth:`create`, then started and stopped at will."""

    def __init__(self, folder: Path):
        self.folder = folder

    @property
    def url(self) -> str:
        """Of its first database, as a user that may create others."""
        return f"postgresql://{SERVER_USER}@/postgres?host={self.folder}"

    def create(self) -> None:
        """Make the server's files."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if os.geteuid() == 0:
            shutil.chown(self.folder, SERVER_USER, SERVER_USER)
        options = ["--no-sync", "--auth=trust", "--encoding=UTF8", "--locale=C", f"--username={SERVER_USER}"]
        self._run("initdb", *options, "--pgdata", str(self.folder / "data"))

    def start(self) -> None:
        """Start, and wait until it answers."""
        options = " ".join(f"-c {name}={value}" for name, value in SETTINGS.items())
        options += f" -c unix_socket_directories={self.folder}"
        log, wait = str(self.folder / "log"), ["-w", "-t", str(START_SECONDS)]
        self._run("pg_ctl", "start", "-D", str(self.folder / "data"), "-l", log, "-o", options, *wait)

    def stop(self) -> None:
        """End every connection and the server."""
        self._run("pg_ctl", "stop", "-D", str(self.folder / "data"), "-m", "immediate", "-w")

    def _run(self, program: str, *arguments: str) -> None:
        as_whom = {"user": SERVER_USER, "group": SERVER_USER, "extra_groups": []} if os.geteuid() == 0 else {}
        # Into a file: a server that inherits a pipe would hold it open for ever.
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
    """A server for one test alone, which may stop it."""
    folder = Path(tempfile.mkdtemp(prefix="zbv-pg-"))  # not below pytest's: paths of sockets are short
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
        A folder that all processes of the session know.
    """

    def __init__(self, place: Path):
        self._address = place / "postgres"
        self._share = (place / "postgres.users").open("a")
        # Waits for a guard that is just ending a server which nobody needed any more.
        fcntl.flock(self._share, fcntl.LOCK_SH)
        with (place / "postgres.lock").open("a") as alone:
            fcntl.flock(alone, fcntl.LOCK_EX)
            if not self._address.exists():
                _start_guard(place)
        self.url = Server(Path(self._address.read_text())).url

    def close(self) -> None:
        """Give the share up."""
        self._share.close()


def _start_guard(place: Path) -> None:
    """Start a guard that is nobody's child, and wait until its server answers."""
    command = [sys.executable, __file__, str(place)]
    with (place / "postgres.log").open("a") as log:
        ran = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            timeout=2 * START_SECONDS,
            check=False,
        )
    if ran.returncode != 0:
        raise RuntimeError(f"no PostgreSQL server: {(place / 'postgres.log').read_text()}")


def guard(place: Path) -> None:
    """Run the shared server until nobody has a share in it."""
    with a_server() as server, (place / "postgres.users").open("a") as users:
        _publish(place / "postgres", str(server.folder))
        fcntl.flock(users, fcntl.LOCK_EX)
        (place / "postgres").unlink(missing_ok=True)


def main(place: Path) -> int:
    """Fork a guard; returns once it has published its server's address, or has ended."""
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
