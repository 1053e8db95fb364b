"""A rank's progress: the step and action that its executor is at, and the peer that it waits for.

The executor updates it once per action with a single assignment, because time between actions is lost to
compute. Other threads may read it at any time.
"""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass

from zbv_worker.execution.rank_plan import Instruction
from zbv_worker.host.state_files import write_json
from zbv_worker.transport.failure_watch import Doing

_ATTRIBUTE = "zbv_place"


@dataclass(frozen=True)
class Progress:
    """A rank's progress; all fields are None before its first action."""

    step: int | None = None
    action: str | None = None
    peer: int | None = None
    """The global rank that sends the action's input; for an error, the rank that this rank waited for."""


class CurrentProgress:
    """A rank's current progress. One thread updates it, any thread may read it.

    Attributes
    ----------
    now
        Step and instruction in one tuple, so that a reader always gets a matching pair.
    waiting_for
        The global rank whose tensor the host, or its GPU, waits for at the moment; None if it waits for none.
    """

    __slots__ = ("now", "waiting_for")

    def __init__(self) -> None:
        self.now: tuple[int, Instruction] | None = None
        self.waiting_for: int | None = None

    def read(self) -> Progress:
        """A snapshot of the progress."""
        now = self.now
        if now is None:
            return Progress()
        step, instruction = now
        return Progress(step, str(instruction.action), instruction.peer)

    def doing(self) -> Doing:
        """The progress as other ranks see it."""
        at = self.read()
        return Doing(
            "its first step" if at.step is None else f"step {at.step}, {at.action}", self.waiting_for
        )


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


class ProgressWriter:
    """Writes a rank's progress to a file from a thread, for the duration of a ``with`` block.

    Parameters
    ----------
    path
        Replaced atomically, so that readers never see a partial file.
    progress
        The progress to write.
    seconds
        Time between two writes.
    """

    def __init__(self, path: str, rank: int, progress: CurrentProgress, seconds: float = 0.25):
        self._path = path
        self._rank = rank
        self._progress = progress
        self._seconds = seconds
        self._ended = threading.Event()
        self._written: Progress | None = None
        self._thread = threading.Thread(target=self._write_on, name="zbv-progress", daemon=True)

    def __enter__(self) -> ProgressWriter:
        self._write()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(timeout=5.0)
        self._write()  # the final progress

    def _write_on(self) -> None:
        while not self._ended.wait(self._seconds):
            self._write()

    def _write(self) -> None:
        progress = self._progress.read()
        if progress == self._written:
            return
        self._written = progress
        fields = asdict(progress)
        del fields["peer"]
        write_json(self._path, {"rank": self._rank, **fields})
