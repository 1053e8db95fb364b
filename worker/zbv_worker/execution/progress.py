"""Where a rank is: the step and the action that its executor turned to last, and whom it waits for.

The executor says so itself, once per action and at the price of one store: between actions every microsecond
is one in which a rank does not compute. Other threads read it when they like.
"""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass

from zbv_worker.execution.rank_plan import Instruction
from zbv_worker.host.state_files import write_json

_ATTRIBUTE = "zbv_place"


@dataclass(frozen=True)
class Place:
    """A rank's place; all None before its first action.

    Attributes
    ----------
    peer
        The global rank whose tensor the action needs.
    """

    step: int | None = None
    action: str | None = None
    peer: int | None = None


class CurrentPlace:
    """Where a rank is now. One thread says so, any thread may ask.

    Attributes
    ----------
    now
        Step and instruction, in one tuple: whoever reads it finds two that belong together.
    """

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now: tuple[int, Instruction] | None = None

    def read(self) -> Place:
        """The place in words."""
        now = self.now
        if now is None:
            return Place()
        step, instruction = now
        return Place(step, str(instruction.action), instruction.peer)


def mark_error(error: BaseException, place: Place) -> None:
    """Have an error say where its rank was; what an inner executor said stands."""
    if not isinstance(getattr(error, _ATTRIBUTE, None), Place):
        setattr(error, _ATTRIBUTE, place)


def place_of_error(error: BaseException) -> Place | None:
    """Where a rank was when it raised, as said by the error or one of its causes; None when none does."""
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
    """Writes a rank's place to a file, from a thread, while its block lasts.

    Parameters
    ----------
    path
        Replaced as a whole, so that readers never see half of it.
    place
        What to look at.
    seconds
        Between two looks.
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
        self._write()  # where it ended

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
