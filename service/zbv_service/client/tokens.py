"""Which token a client sends, and where a service on this machine leaves one for the commands of its user.

A service that listens on the loopback interface writes its token to a file that only its user can read, so
commands need no configuration there. Both sides use this module to find that file.
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
    """A token or a certificate cannot be used. The message names it and says what to do."""


def find(server: str) -> str | None:
    """The token for a service; None when there is none.

    The token is ``ZBV_TOKEN``, or the content of the file ``ZBV_TOKEN_FILE``, or that of the file which a
    service on this machine left for its user.

    Raises
    ------
    CredentialsUnusable
        When a variable is set to something that cannot be used.
    """
    if text := os.environ.get(TOKEN_VARIABLE, "").strip():
        return _checked(text, f"${TOKEN_VARIABLE}")
    if name := os.environ.get(FILE_VARIABLE, ""):
        return read_file(Path(name))
    port = loopback_port(server)
    return None if port is None else _local_token(port)


def read_file(path: Path) -> str:
    """The token in a file, alone on its first line; raises :class:`CredentialsUnusable`."""
    where = f"--token-file (${FILE_VARIABLE})"
    try:
        text = path.read_text(encoding="ascii")
    except OSError as error:
        raise CredentialsUnusable(f"{where}: cannot read {path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise CredentialsUnusable(f"{where}: {path} is not ASCII text, so it contains no token.") from None
    return _checked(text.strip(), f"{where}: {path}")


def loopback_port(server: str) -> int | None:
    """The port of a server on this machine; None for a server elsewhere."""
    try:
        parts = urlsplit(server)
        port = parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        return None
    return port if parts.hostname and is_loopback(parts.hostname) else None


def is_loopback(host: str) -> bool:
    """Whether a host's name or address alone shows that it is this machine."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


def local_files(port: int) -> Iterator[Path]:
    """Where a service on a port of this machine may leave its token, in order of preference.

    The runtime directory is emptied at a reboot. Machines without one use the state directory. Several
    machines may share that, so its file names contain the machine's name. The default places are included
    because a command may run without the session's variables.
    """
    runtime = [os.environ.get("XDG_RUNTIME_DIR"), f"/run/user/{os.getuid()}"]
    state = [state_folder(), Path(os.path.expanduser("~/.local/state")) / "zbv"]
    for folder in dict.fromkeys(filter(None, runtime)):
        if os.path.isdir(folder):  # only the system may create it
            yield Path(folder) / "zbv" / f"token-{port}"
    for place in dict.fromkeys(state):
        yield place / f"token-{platform.node()}-{port}"


def state_folder() -> Path:
    """The directory for files that survive a reboot: ``$XDG_STATE_HOME/zbv``, or ``~/.local/state/zbv``."""
    return Path(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")) / "zbv"


def _local_token(port: int) -> str | None:
    for path in local_files(port):
        try:
            if path.stat().st_uid != os.getuid():
                continue  # another user's service
            return _checked(path.read_text(encoding="ascii").strip(), str(path))
        except (OSError, ValueError):
            continue  # if the service needs a token, it says so
    return None


def _checked(text: str, where: str) -> str:
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise CredentialsUnusable(
            f"{where} contains no token: it must be one word such as zbv_…, as `zbv-service token create` "
            f"prints it."
        )
    return text
