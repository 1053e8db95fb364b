"""The local token of a service on the loopback interface, for commands of the same user.

It is in two files. One is private to the service and remains after it, so that the next start uses the same
token and polling clients continue. The other one is for commands and exists only while the service runs: a
command must not send the token to another program that listens on the port afterwards.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import platform
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zbv_service.client.tokens import local_files, state_folder
from zbv_service.security.tokens import TokenText
from zbv_service.settings import shown_url, sqlite_file

_KEPT = "secret-"
_MOST_BYTES = 8192
_LOCK_SECONDS = 10.0

logger = logging.getLogger(__name__)


def kept_token(port: int, database: str) -> TokenText:
    """The local token of the service with this port and database: the one of its last start, or a new one.

    It is in ``secret-MACHINE-PORT-…`` in the state directory. A file that others could read or write is
    replaced. If no file can be written, the token is valid for this start only.
    """
    name = _database_name(database)
    digest = hashlib.sha256(name.encode()).hexdigest()[:12]
    path = state_folder() / f"{_KEPT}{platform.node()}-{port}-{digest}"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _alone_in(path.parent):
            token = _read_kept(path, name)
            if token is None:
                token = TokenText.new()
                os.close(_write_private(path, f"{token}\n{name}\n"))
                _forget_deleted_databases(path)
    except OSError as error:
        logger.warning(
            "cannot keep the local token in %s (%s): after a restart of the service clients need a new one. "
            "Set XDG_STATE_HOME to a directory that can be written.",
            path,
            error.strerror,
        )
        return TokenText.new()
    return token


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Lock a directory within the block, because two services may start at once. Raises TimeoutError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        deadline = time.monotonic() + _LOCK_SECONDS
        while not _locked(descriptor):
            if time.monotonic() > deadline:
                raise TimeoutError(errno.ETIMEDOUT, "another service holds its lock")
            time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    """Take a lock; True also if the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _read_kept(path: Path, database: str) -> TokenText | None:
    """The token in a private file of this user for this database, or None."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        is_private = stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
        lines = file.read(_MOST_BYTES).decode(errors="replace").splitlines() if is_private else []
    return TokenText.parse(lines[0]) if len(lines) == 2 and lines[1] == database else None


def _forget_deleted_databases(own: Path) -> None:
    """Remove tokens of databases with deleted files, for example in temporary folders."""
    for path in own.parent.glob(f"{_KEPT}{platform.node()}-*"):
        with suppress(OSError):
            lines = path.read_text(errors="replace").splitlines()
            is_file = len(lines) == 2 and lines[1].startswith("/")
            if path != own and is_file and not os.path.exists(lines[1]):
                path.unlink()


def _database_name(url: str) -> str:
    """A stable name of a database: the path of its file, or its URL without the password."""
    file = sqlite_file(url)
    return shown_url(url) if file is None else str(file.resolve())


@contextmanager
def left_behind(port: int, token: str) -> Iterator[Path | None]:
    """Within the block, offer the token of a port to commands of this user in a file.

    Yields None if no directory can be written. A service holds a lock on its file until its process ends, so
    the next service can remove the files of killed services.
    """
    for path in local_files(port):
        try:
            descriptor = _write_private(path, f"{token}\n")
        except OSError:
            continue
        _remove_stale(path, port)
        try:
            yield path
        finally:
            _remove(path, token)
            os.close(descriptor)
        return
    yield None


def _write_private(path: Path, text: str) -> int:
    """Atomically write a file that only this user can read; returns its descriptor, which holds a lock."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, text.encode())
        with suppress(OSError):  # a file system without locks; then stale files are not removed either
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fresh.replace(path)
    except OSError:
        os.close(descriptor)
        fresh.unlink(missing_ok=True)
        raise
    return descriptor


def _remove_stale(own: Path, port: int) -> None:
    """Remove the files of dead services of this machine."""
    for path in own.parent.glob(own.name.removesuffix(str(port)) + "*"):
        if path == own or not path.name.rpartition("-")[2].isdecimal():
            continue
        with suppress(OSError), path.open() as file:  # locked if its service runs
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _remove(path: Path, token: str) -> None:
    """Remove the file, unless another service has replaced it in the meantime."""
    with suppress(OSError):
        if path.read_text().strip() == token:
            path.unlink()
