"""A rank's progress: the step and action that its executor is at, and the peer that it waits for.

The executor updates it once per action with a single assignment, because time between actions is lost to
compute. Other threads may read it at any time. An error takes it along, for logs and for the agent.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from zbv_worker.errors import ChannelTimeout, Disagreement, InvalidRun, PeerLost, Superseded, WorkerError
from zbv_worker.host.process import say
from zbv_worker.host.state_files import write_json

_ATTRIBUTE = "zbv_place"


class Place(Protocol):
    """A place in a rank's list: an instruction."""

    @property
    def action(self) -> object:
        """The action."""

    @property
    def peer(self) -> int | None:
        """The global rank that sends the action's input; None if no other rank does."""


@dataclass(frozen=True)
class Progress:
    """A rank's progress; all fields are None before its first action."""

    step: int | None = None
    action: str | None = None
    peer: int | None = None
    """The global rank that sends the action's input; for an error, the rank that this rank waited for."""


class CurrentProgress:
    """A rank's current progress. One thread updates it, any thread may read it."""

    __slots__ = ("doing", "now", "waiting_for")

    def __init__(self) -> None:
        # What the rank does, in words; between two actions of a step, for instance.
        self.doing = ""
        # Step and instruction in one tuple, so that a reader always gets a matching pair.
        self.now: tuple[int, Place] | None = None
        # The global rank whose tensor the host, or its GPU, waits for at the moment.
        self.waiting_for: int | None = None

    def read(self) -> Progress:
        """A snapshot of the progress."""
        now = self.now
        if now is None:
            return Progress()
        step, instruction = now
        return Progress(step, str(instruction.action), instruction.peer)


def attach_progress(error: BaseException, progress: Progress) -> None:
    """Attach a rank's progress to an error; an earlier, more precise one stays."""
    if not isinstance(getattr(error, _ATTRIBUTE, None), Progress):
        setattr(error, _ATTRIBUTE, progress)


def progress_of_error(error: BaseException) -> Progress | None:
    """The progress attached to an error or one of its causes; None if there is none."""
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        progress = getattr(cause, _ATTRIBUTE, None)
        if isinstance(progress, Progress):
            return progress
        cause = cause.__cause__ or cause.__context__
    return None


class ProgressFile:
    """A rank's progress in a file, for the agent. Readers see no partial file."""

    def __init__(self, path: Path, rank: int, progress: CurrentProgress):
        self._path, self._rank, self._progress = path, rank, progress
        self._written: Progress | None = None
        self._obstacle = ""

    def write(self) -> bool:
        """Write the progress if it has changed. Returns True, as a duty of the liveness thread."""
        progress = self._progress.read()
        if progress == self._written:
            return True
        fields = asdict(progress)
        del fields["peer"]
        try:
            write_json(self._path, {"rank": self._rank, **fields})
        except OSError as error:  # a full disk must not end a run that may not need it
            if str(error) != self._obstacle:
                say(f"rank {self._rank}: its progress could not be written: {error}")
            self._obstacle = str(error)
        else:
            self._written = progress
        return True


def failure_of(rank: int, error: BaseException, detail: str, current: Progress) -> dict[str, Any]:
    """A failure in the agent's format. One that a peer caused has its own kind.

    An error between two actions, for instance in the update, has only a step.
    """
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


def described(rank: int, error: BaseException) -> str:
    """Why a rank that trains a model failed, for the agent."""
    if isinstance(error, WorkerError):
        return str(error)
    detail = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    return f"rank {rank} failed in the model or in torch: {detail}. Its log has the traceback."
