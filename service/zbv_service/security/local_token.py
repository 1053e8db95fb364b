"""The token that a service on the loopback interface leaves for the commands of its user."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zbv_service.client_token import local_files


@contextmanager
def left_behind(port: int, token: str) -> Iterator[Path | None]:
    """Leave a token where commands of this user look for that of a port; gone at the end.

    None where no directory can be written. One that a killed process left is replaced, and does no harm
    until then: nothing knows its token any more.
    """
    path = next((path for path in local_files(port) if _write(path, token)), None)
    try:
        yield path
    finally:
        if path is not None:
            _remove(path, token)


def _write(path: Path, token: str) -> bool:
    """Write a file that nobody else can read, whole or not at all."""
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        if not path.parent.is_dir():
            path.parent.mkdir(mode=0o700, parents=True)
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(token + "\n")
        fresh.replace(path)
    except OSError:
        with suppress(OSError):
            fresh.unlink()
        return False
    return True


def _remove(path: Path, token: str) -> None:
    """Remove the file, unless another service has left its own there meanwhile."""
    with suppress(OSError):
        if path.read_text().strip() == token:
            path.unlink()
