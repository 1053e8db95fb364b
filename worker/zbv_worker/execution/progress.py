"""A rank's progress: the step and action that its executor is at, and the peer that it waits for.

The executor updates it once per action with a single assignment, because time between actions is lost to
compute. Other threads may read it at any time.
"""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass

from zbv_worker.execution.rank_plan import Instruction
from zbv_worker.host.state_files import write_json

_ATTRIBUTE = "zbv_place"


@dataclass(frozen=True)
class Place:
    """A rank's progress; all fields are None before its first action.

    Attributes
    ----------
    peer
        The global rank that sends the action's input.
    """

    step: int | None = None
    action: str | None = None
    peer: int | None = None


class CurrentPlace:
    """A rank's current progress. One thread updates it, any thread may read it.

    Attributes
    ----------
    now
        Step and instruction in one tuple, so that a reader always gets a matching pair.
    """

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now: tuple[int, Instruction] | None = None

    def read(self) -> Place:
        """A snapshot of the progress."""
        now = self.now
        if now is None:
            return Place()
        step, instruction = now
        return Place(step, str(instruction.action), instruction.peer)


def mark_error(error: BaseException, place: Place) -> None:
    """Attach a rank's progress to an error; an earlier, more precise one stays."""
    if not isinstance(getattr(error, _ATTRIBUTE, None), Place):
        setattr(error, _ATTRIBUTE, place)


def place_of_error(error: BaseException) -> Place | None:
    """The progress attached to an error or one of its causes; None if there is none."""
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        place = getattr(cause, _ATTRIBUTE, None)
        if isinstance(place, Place):
            return place
        cause = cause.__cause__ or cause.__context__
    return None


class PlaceWriter:
    """Writes a rank's progress to a file from a thread, for the duration of a ``with`` block.

    Parameters
    ----------
    path
        Replaced atomically, so that readers never see a partial file.
    place
        The progress to write.
    seconds
        Time between two writes.
    """

    def __init__(self, path: str, rank: int, place: CurrentPlace, seconds: float = 0.25):
        self._path = path
        self._rank = rank
        self._place = place
        self._seconds = seconds
        self._ended = threading.Event()
        self._written: Place | None = None
        self._thread = threading.Thread(target=self._write_on, name="zbv-place", daemon=True)

    def __enter__(self) -> PlaceWriter:
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
        place = self._place.read()
        if place == self._written:
            return
        self._written = place
        fields = asdict(place)
        del fields["peer"]
        write_json(self._path, {"rank": self._rank, **fields})
