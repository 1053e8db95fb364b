"""How a rank's process ends when its run fails: soon, with its reason, and whatever its device does.

A kernel that waits for a lost rank never ends, and torch's orderly ways out wait for it. So the process first
records and publishes the reason, then aborts its communicators, and leaves without Python's cleanup. Only the
top level of a process may use this: nothing else in the process survives.
"""

from __future__ import annotations

import faulthandler
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from zbv_worker.errors import ChannelTimeout, Disagreement, InvalidRun, PeerLost, WorkerError
from zbv_worker.execution.progress import CurrentProgress, Progress, attach_progress, progress_of_error
from zbv_worker.host.leaving import leave
from zbv_worker.transport.connected import ABORT_SECONDS, ConnectedTransport
from zbv_worker.transport.control import ControlPlane
from zbv_worker.transport.failure_watch import BEAT_SECONDS, FailureNotes, Loss
from zbv_worker.transport.rendezvous import lives_in_rank_0, say

LEAVE_SECONDS = 30.0
"""The longest time between a failure and the end of the process."""


class Ending:
    """Ends this process after the first failure of its run, in at most :data:`LEAVE_SECONDS`.

    Parameters
    ----------
    record
        Writes the failure where others look for it, such as a file. For a failure that a peer caused it is
        called twice: at once, and when the cause is known.
    report
        Describes the failure in the rank's log; returns the exit status.
    """

    def __init__(self, record: Callable[[Exception], None], report: Callable[[Exception], int]):
        self._record = record
        self._report = report
        self._failed = threading.Lock()
        self._others: _Others | None = None
        self.transport: ConnectedTransport | None = None

    def met(self, control: ControlPlane, notes: FailureNotes, progress: CurrentProgress) -> None:
        """From now on, publish a failure to the other ranks."""
        self._others = _Others(control.rank, control.layout.world_size, notes, progress)

    @property
    def is_needed(self) -> bool:
        """Whether an ordinary exit could hang, because this rank has met others."""
        return self._others is not None

    def lose(self, loss: Loss) -> NoReturn:
        """End the process because of a loss that another thread found."""
        time.sleep(2 * BEAT_SECONDS)  # the rank's own error, if it is about to raise one, says more
        assert self._others is not None
        at, rank = self._others.progress.read(), self._others.rank
        where = "" if at.action is None else f", step {at.step}, at {at.action}"
        error: WorkerError
        if loss.rank == rank:
            error = WorkerError(f"rank {rank}{where}: the other ranks gave this rank up: {loss.reason}")
        elif loss.is_input_wrong:
            error = InvalidRun(f"rank {rank}{where}: {loss}")
        else:
            error = PeerLost(f"rank {rank}{where}: {loss}")
        attach_progress(error, Progress(at.step, at.action, loss.rank if loss.rank != rank else None))
        self.fail(error)

    def close(self, transport: ConnectedTransport) -> None:
        """Close the transport of a run that has succeeded; ends the process, with status 0, if that hangs.

        NCCL destroys a communicator without a time limit. Everything that the run writes must be written.
        """

        def give_up() -> None:
            say(
                f"rank {transport.rank}: the run is complete, but its connections did not close within "
                f"{LEAVE_SECONDS:g} s. The process ends without them."
            )
            leave(0)

        limit = threading.Timer(LEAVE_SECONDS, give_up)
        limit.daemon = True
        limit.start()
        try:
            transport.close()
        finally:
            limit.cancel()

    def fail(self, error: Exception) -> NoReturn:
        """End the process because of an error."""
        self._failed.acquire()  # never released: the first failure ends the process
        # A thread of C that needs no lock of Python's interpreter: it ends the process even if an abort
        # blocks.
        faulthandler.dump_traceback_later(LEAVE_SECONDS, exit=True)
        status = 1
        try:
            status = self._tell(error)
            if self.transport is not None:
                self.transport.abort(ABORT_SECONDS)
            if self._others is not None and self._others.rank == 0 and lives_in_rank_0():
                time.sleep(2 * BEAT_SECONDS)  # the others read the reason from this process
        finally:
            leave(status)

    def _tell(self, error: Exception) -> int:
        """Record, publish and report an error; returns the exit status.

        Recorded first: another rank that reads the cause ends, and an agent may then end this process too.
        """
        others = self._others
        self._try_to_record(error)
        if others is not None:
            if isinstance(error, ChannelTimeout | PeerLost):
                error = others.blame(error)
                self._try_to_record(error)
            else:
                is_input_wrong = isinstance(error, InvalidRun | Disagreement)
                others.publish(Loss(others.rank, _one_line(error), is_input_wrong))
        return self._report(error)

    def _try_to_record(self, error: Exception) -> None:
        try:
            self._record(error)
        except OSError as obstacle:  # the other ranks must learn the cause all the same
            say(f"the reason of the failure could not be written: {obstacle}")


@dataclass(frozen=True)
class _Others:
    """The other ranks, as a failed rank sees them."""

    rank: int
    world_size: int
    notes: FailureNotes
    progress: CurrentProgress

    def blame(self, error: ChannelTimeout | PeerLost) -> Exception:
        """Find and publish the rank to blame, which is not always the one that this rank waited for."""
        at = progress_of_error(error)
        try:
            if at is not None and at.peer is not None:
                loss: Loss | None = self.notes.cause(at.peer)
            else:
                loss = self.notes.silent_one(self.world_size)
        except ConnectionError as gone:
            loss = Loss(0, str(gone))
        self.publish(loss or Loss(self.rank, _one_line(error)))
        if loss is None or loss.rank == self.rank or str(loss) in str(error):
            return error
        made = type(error)(f"{loss}. {error}")
        made.__cause__ = error  # has the progress
        return made

    def publish(self, loss: Loss) -> None:
        """Publish the cause of the failure, unless another rank has, or the store is gone."""
        with suppress(ConnectionError):
            self.notes.publish(loss)


def _one_line(error: Exception) -> str:
    text = str(error).strip().rstrip(".").replace("\n", " ")
    return text if isinstance(error, WorkerError) else f"{type(error).__name__}: {text}"
