"""What accompanies a run on one rank: signs of life, the watch over other ranks, and the start-up.

Connecting and the first step may take long, so a starting rank says what it waits for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from zbv_worker.errors import ChannelTimeout
from zbv_worker.execution.progress import CurrentProgress
from zbv_worker.training.ending import Ending
from zbv_worker.transport.connected import ConnectedTransport
from zbv_worker.transport.failure_watch import SILENT_SECONDS, FailureNotes, FailureWatch
from zbv_worker.transport.gloo_control import GlooControl
from zbv_worker.transport.rendezvous import SAY_SECONDS, say
from zbv_worker.transport.torch_api import Clock, HostClock


class Guard:
    """Watches over one rank of a run, from the moment at which the ranks have met.

    Parameters
    ----------
    timeout
        A rank without a sign of life for somewhat longer is lost: ranks that wait for it notice it first, and
        know more.
    startup_timeout
        The same until the first steps are complete.
    ending
        Ends the process if another rank is lost; None to leave that to the waits of this rank.
    """

    def __init__(
        self,
        control: GlooControl,
        progress: CurrentProgress,
        timeout: float,
        startup_timeout: float,
        ending: Ending | None,
    ):
        self._rank = control.rank
        self._progress = progress
        self._timeout = timeout
        self._ending = ending
        self._watch: FailureWatch | None = None
        self._is_connected = False
        if ending is not None:
            self._watch = self._begin_watch(control, ending, startup_timeout)
        self._startup = Startup(self._rank, startup_timeout, self._doing, self._be_late)

    def _begin_watch(self, control: GlooControl, ending: Ending, patience: float) -> FailureWatch:
        notes = FailureNotes(control.other_notes(), self._rank)
        ending.met(control, notes, self._progress)
        next_rank = (self._rank + 1) % control.layout.world_size
        following = None if next_rank == self._rank else next_rank
        watch = FailureWatch(notes, following, patience, self._progress.doing, ending.lose)
        watch.start()
        return watch

    def connected(self, transport: ConnectedTransport) -> None:
        """Abort this transport after a failure."""
        self._is_connected = True
        if self._ending is not None:
            self._ending.transport = transport

    def started(self) -> None:
        """The first steps are complete."""
        self._startup.done()
        if self._watch is not None:
            self._watch.be_patient(self._timeout + 2 * SILENT_SECONDS)

    def end(self) -> None:
        """Stop, before the last barrier of the run: after it, the ranks' store may end at any time."""
        self._startup.done()
        if self._watch is not None:
            self._watch.stop()

    def _doing(self) -> str:
        if not self._is_connected:
            return "connecting to the other ranks"
        doing = self._progress.doing()
        waits = "" if doing.waits_for is None else f", waits for rank {doing.waits_for}"
        return f"in {doing.at}{waits}"

    def _be_late(self, text: str) -> None:
        if self._ending is None:
            say(text)
        else:
            self._ending.fail(ChannelTimeout(text))


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
