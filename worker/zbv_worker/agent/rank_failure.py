"""Why a rank failed: for its log, its exit status, and the agent."""

from __future__ import annotations

import sys
import traceback
from typing import TYPE_CHECKING, Any

from zbv_worker.errors import (
    ChannelTimeout,
    Disagreement,
    InvalidRun,
    PeerLost,
    Superseded,
    WorkerError,
)

if TYPE_CHECKING:  # ranks import torch after they watch their parent
    from zbv_worker.execution.progress import Progress

FAILED, WRONG_INPUT = 1, 2


def described(rank: int, error: Exception) -> str:
    """Why a rank that trains a model failed, for the agent."""
    if isinstance(error, WorkerError):
        return str(error)
    detail = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    return f"rank {rank} failed in the model or in torch: {detail}. Its log has the traceback."


def report(error: Exception) -> int:
    """Describe a failure in the rank's log; returns the exit status."""
    if not isinstance(error, WorkerError):
        traceback.print_exception(error)
        return FAILED
    say(f"zbv-worker: {error}")
    return status_of(error)


def status_of(error: Exception) -> int:
    """The exit status of a failed rank: another one if a retry with the same input is pointless."""
    return WRONG_INPUT if isinstance(error, InvalidRun | Disagreement) else FAILED


def failure_of(rank: int, error: Exception, detail: str, current: Progress) -> dict[str, Any]:
    """A failure in the agent's format. One that a peer caused has its own kind.

    An error between two actions, for instance in the update, has only a step.
    """
    from zbv_worker.execution.progress import Progress, progress_of_error

    progress = progress_of_error(error) or Progress(current.step)
    kind = "error"
    if isinstance(error, ChannelTimeout | PeerLost):
        kind = "peer"
    elif isinstance(error, InvalidRun | Disagreement | Superseded):
        kind = "invalid"
    return {
        "kind": kind,
        "rank": rank,
        "step": progress.step,
        "action": progress.action,
        "peer": progress.peer,
        "detail": detail,
    }


def say(text: str) -> None:
    """Write a line to the rank's log."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - the rank's log
