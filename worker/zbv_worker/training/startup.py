"""A rank's start: connecting and the first step may take long, so it says what it waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable

from zbv_worker.transport.rendezvous import SAY_SECONDS, say
from zbv_worker.transport.torch_api import Clock, HostClock

_GRACE_SECONDS = 15.0
"""How much longer than the start-up timeout this watch waits, because the wait itself gives a better
error."""


class Startup:
    """Says from a thread what a starting rank does, until :meth:`done`.

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
        self._rank = rank
        self._timeout = timeout
        self._doing = doing
        self._on_late = on_late
        self._clock = clock or HostClock()
        self._begun = self._clock.now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zbv-startup", daemon=True)
        self._thread.start()

    def done(self) -> None:
        """End: the rank has started."""
        self._done.set()

    def _run(self) -> None:
        longest = self._timeout + _GRACE_SECONDS
        since = 0.0
        while not self._done.wait(min(SAY_SECONDS, max(longest - since, 0.0))):
            since = self._clock.now() - self._begun
            if since >= longest:
                self._on_late(
                    f"rank {self._rank} did not start within {self._timeout:g} s: {self._doing()}. If the "
                    f"start takes that long, raise --startup-timeout"
                )
                return
            say(f"rank {self._rank}: {self._doing()} ({since:.0f} s since its start)")
