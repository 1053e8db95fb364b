"""The worker's errors, drawn at one place.

::

    WorkerError
    ├── InvalidRun          what was asked for cannot be run (exit status 2)
    ├── Disagreement        the ranks were started with different plans or models
    ├── Superseded          a newer generation has taken over the checkpoint directory
    ├── ChannelTimeout      a peer did not deliver within the timeout
    ├── PeerLost            the connection to a peer broke
    ├── NotFinite           a loss or a gradient is infinite or not a number
    └── ModelError          a model broke the protocol of zbv_worker.model

A message names the rank it comes from, the action that could not go on, and the peer it waited for.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NOT_THEIRS = re.compile(r"[/\\](torch|zbv_worker)[/\\](?!models[/\\])")
"""Files in which an error of a model's code may come up, and which are not the model's."""


class WorkerError(Exception):
    """Root of every error the worker raises on purpose. The ranks' process group is unusable afterwards."""


class InvalidRun(WorkerError):
    """What was asked for cannot be run: found, rule, remedy."""


class Disagreement(WorkerError):
    """The ranks were not started with the same plan, model and world."""


class Superseded(WorkerError):
    """A newer generation has taken over the checkpoint directory; this one must not write there."""


class ChannelTimeout(WorkerError):
    """A peer did not deliver, or did not take delivery, within the timeout."""


class PeerLost(WorkerError):
    """The connection to a peer broke: its process ended or its host went away."""


class NotFinite(WorkerError):
    """A loss or a gradient is infinite or not a number, and the run is to fail then."""


class ModelError(WorkerError):
    """A model's stage returned something that the protocol of :mod:`zbv_worker.model` does not allow."""


def said(error: WorkerError) -> int:
    """Print an error as commands do; returns the exit status: 2 where trying again would give the same."""
    print(f"zbv-worker: {error}", file=sys.stderr, flush=True)  # noqa: T201 - what a command says
    return 2 if isinstance(error, InvalidRun | Disagreement) else 1


def raised(error: BaseException) -> str:
    """An error of somebody else's code in one line: what it is, what it says, and where it comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not _NOT_THEIRS.search(frame.filename)]
    where = f" ({Path(theirs[-1].filename).name}:{theirs[-1].lineno})" if theirs else ""
    (first, *_) = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {first.rstrip('. ')}{where}"


@contextmanager
def naming_errors(rank: int, what: str) -> Iterator[None]:
    """Gives a transport's errors the worker's names where no action is under way."""
    try:
        yield
    except TimeoutError as error:
        raise ChannelTimeout(f"rank {rank}, {what}: {error}.") from error
    except ConnectionError as error:
        raise PeerLost(f"rank {rank}, {what}: {error}.") from error
