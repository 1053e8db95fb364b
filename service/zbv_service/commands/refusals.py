"""What it means for a command that the service refused: its input is wrong, or something else is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zbv_service.commands.ending import FAILED, WRONG_INPUT, Stop

if TYPE_CHECKING:
    from zbv_service.client import InvalidRequest

_NOT_THE_INPUT = frozenset({401, 403, 404, 409, 410, 421, 429})
"""Refusals that are about the caller or the moment, not about what was submitted."""


def stop_of(error: InvalidRequest, what: str) -> Stop:
    """The end of a command whose request was refused; ``what`` was submitted."""
    if error.status in _NOT_THE_INPUT:
        return Stop(FAILED, str(error))
    lines = [f"  {issue}" for issue in error.issues] or [f"  {error.detail}"]
    return Stop(WRONG_INPUT, "\n".join([f"{what} was refused:", *lines]))
