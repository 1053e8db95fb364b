"""A command's connection to a service, and its message when the service refuses a request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from zbv_service.commands.ending import FAILED, Stop, WrongInput

if TYPE_CHECKING:
    from zbv_service.client import Client, InvalidRequest

_NOT_THE_INPUT = frozenset({401, 403, 404, 409, 410, 421, 429})
"""Statuses that are about the caller, the object or the moment, not about the input."""


@contextmanager
def connected(server: str) -> Iterator[Client]:
    """A client of the service; its errors end the command with the status :data:`FAILED`."""
    from zbv_service.client import Client, ClientError

    with Client(server) as client:
        try:
            yield client
        except ClientError as error:
            raise Stop(FAILED, str(error)) from None


def refused(error: InvalidRequest, sources: Mapping[str, str]) -> Stop:
    """How a command ends after its request was refused.

    Parameters
    ----------
    sources
        For the pointer of a part of the request, the flag or the file that it comes from. The message
        replaces the longest matching pointer by it.
    """
    if error.status in _NOT_THE_INPUT:
        return Stop(FAILED, str(error))
    lines = [f"{_named(issue.pointer, sources)}: {issue.detail}" for issue in error.issues]
    return WrongInput("\n  ".join(lines or [error.detail]))


def _named(pointer: str, sources: Mapping[str, str]) -> str:
    known = [start for start in sources if pointer == start or pointer.startswith(f"{start}/")]
    if not known:
        return pointer
    start = max(known, key=len)
    rest = pointer.removeprefix(start)
    return f"{sources[start]}: {rest}" if rest else sources[start]
