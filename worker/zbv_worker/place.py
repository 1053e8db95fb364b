"""Where a rank is: the step and the action that its executor turned to last, and whom it waits for.

Read from outside, off the executor's frame: between actions every microsecond is one in which a rank does
not compute, so the loop keeps no account of itself. What another thread reads may be an action old.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from types import FrameType, TracebackType
from typing import Any

from zbv_worker.executor import Executor
from zbv_worker.rank_plan import Instruction, Remote
from zbv_worker.state_files import write_json

_LOOP = Executor.step.__code__


@dataclass(frozen=True)
class Place:
    """A rank's place; all None before its first action.

    Attributes
    ----------
    peer
        The rank whose tensor the action needs.
    """

    step: int | None = None
    action: str | None = None
    peer: int | None = None


def place_of_thread(thread_id: int) -> Place | None:
    """Where a thread's executor is; None when it is in none (between steps, say)."""
    return _first(_outwards(sys._current_frames().get(thread_id)))


def place_of_error(error: BaseException) -> Place | None:
    """Where an executor was when it raised; None when none did."""
    return _first(_inwards(error.__traceback__))


def _first(frames: Iterator[FrameType]) -> Place | None:
    for frame in frames:
        if frame.f_code is _LOOP:
            values = frame.f_locals
            return _place(values.get("step"), values.get("instruction"))
    return None


def _place(step: Any, instruction: Any) -> Place:
    if not isinstance(instruction, Instruction):
        return Place(step)
    source = instruction.source
    peer = source.channel.sender if isinstance(source, Remote) else None
    return Place(step, str(instruction.action), peer)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _inwards(trace: TracebackType | None) -> Iterator[FrameType]:
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


class PlaceWriter:
    """Writes a rank's place to a file, from a thread, while its block lasts.

    Parameters
    ----------
    path
        Replaced as a whole, so that readers never see half of it.
    seconds
        Between two looks.
    """

    def __init__(self, path: str, rank: int, seconds: float = 0.25):
        self._path = path
        self._rank = rank
        self._seconds = seconds
        self._watched = threading.get_ident()
        self._ended = threading.Event()
        self._last = Place()
        self._thread = threading.Thread(target=self._write_on, name="zbv-place", daemon=True)

    def __enter__(self) -> PlaceWriter:
        self._write()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(timeout=5.0)

    def _write_on(self) -> None:
        while not self._ended.wait(self._seconds):
            found = place_of_thread(self._watched)
            if found is not None and found != self._last:
                self._last = found
                self._write()

    def _write(self) -> None:
        place = asdict(self._last)
        del place["peer"]
        write_json(self._path, {"rank": self._rank, **place})
