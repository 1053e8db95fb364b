"""The token that a service on the loopback interface leaves for the commands of its user."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zbv_service.client_token import local_files


@contextmanager
def left_behind(port: int, token: str) -> Iterator[Path | None]:
    """Leave a token where commands of this user look for that of a port; gone at the end.

    None where no directory can be written. What killed services left does no harm, as nothing knows its token
    any more; it is removed all the same. That a service lives shows in the lock that it holds on its file,
    which ends with its process.
    """
    path, held = None, None
    for path in local_files(port):
        held = _write(path, token)
        if held is not None:
            _sweep(path, port)
            break
    try:
        yield None if held is None else path
    finally:
        if held is not None and path is not None:
            _remove(path, token)
            os.close(held)


def _write(path: Path, token: str) -> int | None:
    """Write a file that nobody else can read, whole or not at all; its descriptor, which holds a lock."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = None
    try:
        if not path.parent.is_dir():
            path.parent.mkdir(mode=0o700, parents=True)
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(descriptor, f"{token}\n".encode())
        with suppress(OSError):  # not every file system has locks; then nobody sweeps it either
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fresh.replace(path)
    except OSError:
        with suppress(OSError):
            fresh.unlink()
        if descriptor is not None:
            os.close(descriptor)
        return None
    return descriptor


def _sweep(own: Path, port: int) -> None:
    """Remove the files of services of this machine that are no more."""
    for path in own.parent.glob(own.name.removesuffix(str(port)) + "*"):
        if path == own or not path.name.rpartition("-")[2].isdecimal():
            continue
        with suppress(OSError), path.open() as file:  # locked: its service lives
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _remove(path: Path, token: str) -> None:
    """Remove the file, unless another service has left its own there meanwhile."""
    with suppress(OSError):
        if path.read_text().strip() == token:
            path.unlink()
