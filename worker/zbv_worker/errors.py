"""All errors of the worker.

::

    WorkerError
    ├── InvalidRun          the run is impossible with this input (exit status 2)
    ├── Disagreement        the ranks were started with different plans or models (exit status 2)
    ├── Superseded          a newer generation has taken over the checkpoint directory
    ├── StorageFailed       a checkpoint cannot be written or read now, for instance on a full disk
    ├── ChannelTimeout      a peer did not deliver within the timeout
    ├── PeerLost            the connection to a peer broke
    ├── NotFinite           a loss or a gradient is infinite or NaN
    ├── Interrupted         the user ended the run (exit status 130)
    └── ModelError          a model violated the protocol of zbv_worker.model

A message names the rank, the action that could not continue, and the peer that the rank waited for.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

EXIT_INTERRUPTED = 130
"""The exit status after Ctrl-C, as of shells and ``zbv``."""
_NOT_USER_CODE = re.compile(r"[/\\](torch|zbv_worker)[/\\](?!models[/\\])")
"""Files that appear in tracebacks of errors in a model's code, but are not the model's."""


class WorkerError(Exception):
    """Base of the worker's own errors. The ranks' process group is unusable afterwards."""


class InvalidRun(WorkerError):
    """The run is impossible with this input; the message has the finding, the rule and the remedy."""


class Disagreement(WorkerError):
    """The ranks were not started with the same plan, model and world."""


class Superseded(WorkerError):
    """A newer generation has taken over the checkpoint directory; this one must not write there."""


class StorageFailed(WorkerError):
    """A file system failed, for instance because it is full; a later attempt may succeed."""


class ChannelTimeout(WorkerError):
    """A peer did not send, or did not receive, within the timeout."""


class PeerLost(WorkerError):
    """The connection to a peer broke: its process ended or its host went away."""


class NotFinite(WorkerError):
    """A loss or a gradient is infinite or NaN, and the run must fail then."""


class Interrupted(WorkerError):
    """The user ended the run, with Ctrl-C."""


class ModelError(WorkerError):
    """A model violated the protocol of :mod:`zbv_worker.model`."""


def print_error(error: BaseException) -> int:
    """Describe an error in the log; returns the exit status."""
    if isinstance(error, WorkerError):
        print(f"zbv-worker: {error}", file=sys.stderr, flush=True)  # noqa: T201 - output of a command
    else:
        traceback.print_exception(error)
    return status_of(error)


def status_of(error: BaseException) -> int:
    """The exit status: 2 if a retry with the same input is pointless, 130 after Ctrl-C, else 1."""
    if isinstance(error, Interrupted):
        return EXIT_INTERRUPTED
    return 2 if isinstance(error, InvalidRun | Disagreement) else 1


def describe_error(error: BaseException) -> str:
    """Summarise an error of a model's code in one line: class, message and location."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not _NOT_USER_CODE.search(frame.filename)]
    where = f" ({Path(theirs[-1].filename).name}:{theirs[-1].lineno})" if theirs else ""
    (first, *_) = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {first.rstrip('. ')}{where}"


@contextmanager
def naming_errors(rank: int, what: str) -> Iterator[None]:
    """Convert a transport's errors to the worker's, outside of actions."""
    try:
        yield
    except TimeoutError as error:
        raise ChannelTimeout(f"rank {rank}, {what}: {str(error).rstrip('.')}.") from error
    except ConnectionError as error:
        raise PeerLost(f"rank {rank}, {what}: {str(error).rstrip('.')}.") from error
