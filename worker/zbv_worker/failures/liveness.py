"""One thread per rank that does what must go on while the rank computes, waits, or hangs.

It gives signs of life and watches the other ranks (:class:`~.blame.PeerWatch`), watches the agent, writes the
progress for the agent, and says what a starting rank waits for. It works while the rank waits inside CUDA,
NCCL or gloo. Imports no torch: a rank watches its agent before it imports torch, which takes seconds.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from zbv_worker.host.process import Clock, HostClock, say
from zbv_worker.host.state_files import PULSE

BEAT_SECONDS = 0.5
SAY_SECONDS = 30.0
"""Time between two messages of a rank that starts."""
ABANDONED = 71
"""Exit status of a rank whose agent was silent for too long."""
_GRACE_SECONDS = 15.0
"""How much longer than the start-up timeout :class:`StartWatch` waits, because the wait itself gives a better
error."""

Duty = Callable[[], bool]
"""Called at every beat from the thread, as long as it returns True. Must not raise."""


class Liveness:
    """Calls duties at every beat from one thread, which runs from the first duty on until :meth:`stop`."""

    def __init__(self, seconds: float = BEAT_SECONDS) -> None:
        self._seconds = seconds
        self._duties: dict[Duty, None] = {}  # a set in order, from which two threads may remove the same duty
        self._turn = threading.RLock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._go_on, name="zbv-liveness", daemon=True)

    def add(self, *duties: Duty) -> None:
        """Begin these duties at the next beat."""
        self._duties |= dict.fromkeys(duties)
        if not self._thread.is_alive() and not self._ended.is_set():
            self._thread.start()

    def remove(self, duty: Duty) -> None:
        """End a duty, if it has not ended; it does not run any more then, unless it hangs."""
        self._duties.pop(duty, None)
        if self._turn.acquire(timeout=10 * BEAT_SECONDS):
            self._turn.release()

    def stop(self) -> None:
        """End all duties; idempotent."""
        self._ended.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=10 * BEAT_SECONDS)

    def _go_on(self) -> None:
        while not self._ended.wait(self._seconds):
            for duty in [*self._duties]:
                with self._turn:
                    if duty in self._duties and not duty():
                        self._duties.pop(duty, None)


class AgentWatch:
    """Ends this process when its agent has written no pulse for ``patience`` seconds.

    Parameters
    ----------
    folder
        The generation's folder.
    report
        Called before the end, with the seconds of silence.
    """

    def __init__(self, folder: Path, patience: float, report: Callable[[float], None]):
        self._path, self._patience, self._report = folder / PULSE, patience, report

    def look(self) -> bool:
        """Look once."""
        silent = self._silence()
        if silent <= self._patience:
            return True
        try:
            self._report(silent)
        finally:
            os._exit(ABANDONED)

    def _silence(self) -> float:
        """Seconds since the agent wrote its pulse; 0 if there is no pulse to read."""
        try:
            return max(0.0, time.monotonic() - float(self._path.read_text()))
        except (OSError, ValueError):
            return 0.0


class StartWatch:
    """Says what a starting rank does, until :meth:`done`.

    Parameters
    ----------
    timeout
        The longest start in seconds.
    doing
        What the rank does at the moment, in words.
    on_late
        Called once with a description if the start takes longer than that. Connecting may block a rank inside
        NCCL, where no timeout of the worker applies.
    """

    def __init__(
        self,
        rank: int,
        timeout: float,
        doing: Callable[[], str],
        on_late: Callable[[str], None],
        clock: Clock | None = None,
    ):
        self._rank, self._timeout = rank, timeout
        self._doing, self._on_late = doing, on_late
        self._clock = clock or HostClock()
        self._begun = self._said = self._clock.now()
        self._is_done = False

    def done(self) -> None:
        """The rank has started."""
        self._is_done = True

    def look(self) -> bool:
        """Look once."""
        if self._is_done:
            return False
        now = self._clock.now()
        since = now - self._begun
        if since >= self._timeout + _GRACE_SECONDS:
            self._on_late(
                f"rank {self._rank} did not start within {self._timeout:g} s: {self._doing()}. If the start "
                f"takes that long, raise --startup-timeout"
            )
            return False
        if now - self._said >= SAY_SECONDS:
            self._said = now
            say(f"rank {self._rank}: {self._doing()} ({since:.0f} s since its start)")
        return True
