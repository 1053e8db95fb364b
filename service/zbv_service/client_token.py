"""Which token a client sends: the one it was told, or that of a service of the same user on this machine.

A service that listens on the loopback interface leaves its token in a file that only its user can read, so
that commands need no configuration there. This module knows where, for both sides.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

TOKEN_VARIABLE = "ZBV_TOKEN"
FILE_VARIABLE = "ZBV_TOKEN_FILE"
_PORTS = {"http": 80, "https": 443}


class CredentialsUnusable(ValueError):
    """A token or certificate was named that cannot be used; the message says which and what to do."""


def find(server: str) -> str | None:
    """The token for a service; None when there is none, which a service may also not ask for.

    ``ZBV_TOKEN``, the file that ``ZBV_TOKEN_FILE`` names, or, for a service on this machine, the file that
    it left for its user.

    Raises
    ------
    CredentialsUnusable
        When a token or a file is given and cannot be used.
    """
    if text := os.environ.get(TOKEN_VARIABLE, "").strip():
        return _checked(text, f"${TOKEN_VARIABLE}")
    if name := os.environ.get(FILE_VARIABLE, ""):
        return read_file(Path(name))
    port = loopback_port(server)
    return None if port is None else _left_behind(port)


def read_file(path: Path) -> str:
    """The token in a file, alone on its first line; raises :class:`CredentialsUnusable`."""
    try:
        text = path.read_text(encoding="ascii")
    except OSError as error:
        raise CredentialsUnusable(f"cannot read the token file {path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise CredentialsUnusable(f"{path} holds no token: it is not ASCII text.") from None
    return _checked(text.strip(), str(path))


def loopback_port(server: str) -> int | None:
    """The port of a server on this machine, None of one elsewhere."""
    try:
        parts = urlsplit(server)
        port = parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        return None
    return port if parts.hostname and is_loopback(parts.hostname) else None


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, by its name or address alone."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


def local_files(port: int) -> Iterator[Path]:
    """Where a service on a port of this machine leaves its token, the best place first.

    The runtime directory is gone after a reboot, as such a service is; the state directory is for machines
    without one. Several machines may share that, so its files name theirs. A command that was started without
    the session's variables looks there, too.
    """
    runtime = [os.environ.get("XDG_RUNTIME_DIR"), f"/run/user/{os.getuid()}"]
    state = [state_folder(), Path(os.path.expanduser("~/.local/state")) / "zbv"]
    for folder in dict.fromkeys(filter(None, runtime)):
        if os.path.isdir(folder):  # it is the system's to make
            yield Path(folder) / "zbv" / f"token-{port}"
    for place in dict.fromkeys(state):
        yield place / f"token-{platform.node()}-{port}"


def state_folder() -> Path:
    """The directory for what outlives a reboot: ``$XDG_STATE_HOME/zbv``, or ``~/.local/state/zbv``."""
    return Path(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")) / "zbv"


def _left_behind(port: int) -> str | None:
    for path in local_files(port):
        try:
            if path.stat().st_uid != os.getuid():
                continue  # somebody else's; it is for their commands
            return _checked(path.read_text(encoding="ascii").strip(), str(path))
        except (OSError, ValueError):
            continue  # none there, or none for us: the service says so itself if it asks for one
    return None


def _checked(text: str, where: str) -> str:
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise CredentialsUnusable(
            f"{where} holds no token: it must be one word such as zbv_…, as `zbv-service token create` "
            f"prints it."
        )
    return text
