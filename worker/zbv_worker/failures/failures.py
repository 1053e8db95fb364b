"""The failures of one rank: who is to blame, how the others learn it, and how this rank ends.

The first rank that fails publishes the reason and breaks its connections, so that its peers fail soon too,
with that reason. In a process of the user's, every rank then raises an error. A process of the worker's own
(:class:`OwnProcess`) ends, whatever its device does: a kernel that waits for a lost rank never ends, and
torch's orderly ways out wait for it.
"""

from __future__ import annotations

import atexit
import faulthandler
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass

import torch

from zbv_worker.errors import (
    ChannelTimeout,
    Disagreement,
    Interrupted,
    InvalidRun,
    PeerLost,
    WorkerError,
    describe_error,
    print_error,
)
from zbv_worker.failures.blame import SILENT_SECONDS, Doing, FailureNotes, Loss, Notes, PeerWatch
from zbv_worker.failures.liveness import BEAT_SECONDS, Duty, Liveness, StartWatch
from zbv_worker.failures.progress import CurrentProgress, Progress, attach_progress, progress_of_error
from zbv_worker.host.process import leave, say
from zbv_worker.transport.connected import ABORT_SECONDS, ConnectedTransport, ControlPlane
from zbv_worker.transport.gloo_control import GlooControl
from zbv_worker.transport.rendezvous import lives_in_rank_0

LEAVE_SECONDS = 30.0
"""How long connections may take to close, and the longest time from a failure to the end of the worker's own
process. NCCL has no limit."""
_READ_SECONDS, _POLL_SECONDS = 1.0, 0.05
"""How long a rank without signs of life of the others waits for the reason that another rank publishes."""
_LEAST_PATIENCE = 30.0
"""A rank may be silent this long: code of the user may keep the interpreter busy."""
_OUTSIDE = "code outside of the pipeline"


@dataclass(frozen=True)
class OwnProcess:
    """A process that belongs to the worker: nothing else in it survives the first failure."""

    record: Callable[[BaseException], None] = lambda error: None
    """Writes the failure where others look for it, such as a file. For a failure that a peer caused it is
    called twice: at once, and when the cause is known."""
    report: Callable[[BaseException], int] = print_error
    """Describes the failure in the rank's log; returns the exit status."""


class Failures:
    """The failures of one rank, from the moment at which the ranks have met.

    Parameters
    ----------
    timeout
        A rank without a sign of life for somewhat longer is lost: ranks that wait for it notice it first, and
        know more.
    startup_timeout
        The same until :meth:`started`, and in a process of the user's always.
    progress
        Where the rank is, and which rank it waits for; others read it in its signs of life.
    process
        How the process ends if it is the worker's own; None if it is the user's.
    liveness
        The rank's thread, if it has one already.

    Attributes
    ----------
    on_end
        Called once, after a failure. Must not refer to the pipeline, which would then never be freed.
    """

    def __init__(
        self,
        control: ControlPlane,
        timeout: float,
        startup_timeout: float,
        *,
        progress: CurrentProgress | None = None,
        process: OwnProcess | None = None,
        liveness: Liveness | None = None,
    ):
        self.rank = control.rank
        self.progress = progress or CurrentProgress()
        self.on_end: Callable[[], None] = lambda: None
        self.has_failed = self.is_closed = False
        self._control, self._layout, self._process = control, control.layout, process
        self._timeout, self._startup_timeout = timeout, startup_timeout
        self._notes = FailureNotes(control, control.rank)
        self._transport: ConnectedTransport | None = None
        self._loss: Loss | None = None
        self._watched_loss: Loss | None = None
        self.progress.doing = "connecting to the other ranks"
        self.liveness = liveness or Liveness()
        self._is_own_thread = liveness is None
        self._watch: PeerWatch | None = None
        self._duties: list[Duty] = []
        self._start = StartWatch(self.rank, startup_timeout, self._describe, self._be_late)
        self._failing, self._breaking = threading.Lock(), threading.Lock()
        self._is_broken, self._may_close = False, True

    def watch(self, notes: Notes | None = None) -> None:
        """Watch the other ranks, if there are any, and the start, from a thread until the pipeline ends.

        A failure of another rank breaks this rank's connections, so that its waits end.

        Parameters
        ----------
        notes
            The notes, through a connection that no other thread uses; by default one to the ranks' store.
        """
        if notes is None and isinstance(self._control, GlooControl) and self._layout.world_size > 1:
            notes = self._control.other_notes()
        if notes is not None:
            least = 0.0 if self._process is not None else _LEAST_PATIENCE
            self._watch = PeerWatch(
                FailureNotes(notes, self.rank),
                (self.rank + 1) % self._layout.world_size,
                max(self._startup_timeout, least) + 2 * SILENT_SECONDS,
                self._now,
                self._lose,
                # Without the store of a rank 0 that has left, the last step may still succeed.
                needs_store=self._process is not None,
            )
            self._duties = [self._watch.look]
        if self._watch is not None or self._process is not None:
            self._duties.append(self._start.look)
            self.liveness.add(*self._duties)

    def connected(self, transport: ConnectedTransport) -> None:
        """Abort this transport after a failure."""
        self._transport = transport
        self.progress.doing = "starting"

    def started(self) -> None:
        """The first step is complete."""
        self._start.done()
        # Code of the user may keep the interpreter busy for long, for instance to load data.
        if self._watch is not None and self._process is not None:
            self._watch.patience = self._timeout + 2 * SILENT_SECONDS

    def stop_watching(self) -> None:
        """Stop to watch, before this rank leaves. The others then expect no sign of life from it."""
        duties, self._duties = self._duties, []
        for duty in duties:
            self.liveness.remove(duty)
        if self._is_own_thread:
            self.liveness.stop()
        watch, self._watch = self._watch, None
        if watch is not None:
            with suppress(ConnectionError):  # of the ranks' store: it may have ended with rank 0
                watch.end()

    @contextmanager
    def watched(self, what: str) -> Iterator[None]:
        """A block that needs the other ranks. In the worker's own process, an error ends the process.

        Raises
        ------
        ChannelTimeout, PeerLost
            If a peer failed, with the reason of the rank that failed first.
        WorkerError
            If the pipeline is closed, or has failed before.
        """
        if self.is_closed or self.has_failed:
            raise self._unusable(what)
        # Tensors that are made in inference mode, and kept, could not be used in training.
        outside = torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
        self.progress.doing = what
        try:
            if self._watched_loss is not None:
                raise self._lost(self._watched_loss)
            with outside:
                yield
        except BaseException as error:
            raised = self._fail(error)
            if raised is error:
                raise
            # The other rank's log has the trace that matters.
            raise raised from (None if isinstance(error, ChannelTimeout | PeerLost) else error)
        finally:
            self.progress.doing, self.progress.waiting_for = _OUTSIDE, None

    def end(self, error: BaseException) -> None:
        """End the pipeline on all ranks because of an error of this one."""
        self._fail(error)

    def close_transport(self) -> None:
        """Close the connections; gives up after :data:`LEAVE_SECONDS`.

        The worker's own process then ends, and everything that the run writes must be written. A process of
        the user's goes on, and its exit has the same limit: torch may wait for the connections there.
        """
        transport = self._transport
        if transport is None:
            return
        closing = threading.Thread(target=transport.close, name="zbv-close", daemon=True)
        try:
            closing.start()
        except RuntimeError:  # since Python 3.12, the interpreter starts no threads while it exits
            _limit_exit()
            transport.close()
            faulthandler.cancel_dump_traceback_later()
            return
        closing.join(LEAVE_SECONDS)
        if not closing.is_alive():
            return
        if self._process is not None:
            say(
                f"rank {self.rank}: the run is complete, but its connections did not close within "
                f"{LEAVE_SECONDS:g} s. The process ends without them."
            )
            leave(0)
        self._leave_open("did not close", LEAVE_SECONDS)

    def _now(self) -> Doing:
        """What this rank does, as other ranks see it."""
        at = self.progress.read()
        doing, waits_for = self.progress.doing, self.progress.waiting_for
        is_in_step = at.action is not None and doing == f"step {at.step}"
        return Doing(f"{doing}, {at.action}" if is_in_step else doing, waits_for)

    def _describe(self) -> str:
        doing = self._now()
        waits = "" if doing.waits_for is None else f", waits for rank {doing.waits_for}"
        return doing.at + waits

    def _be_late(self, text: str) -> None:
        if self._process is None:
            say(text)
        else:
            self._fail(ChannelTimeout(text))

    def _lose(self, loss: Loss) -> None:
        """End the waits of this rank because of a loss that the watch has noticed, or its process."""
        if self._process is None:
            self._watched_loss = loss
            self._break()
        else:
            time.sleep(2 * BEAT_SECONDS)  # the rank's own error, if it is about to raise one, says more
            self._fail(self._lost(loss))

    def _lost(self, loss: Loss) -> WorkerError:
        at = self.progress.read()
        if loss.rank == self.rank:
            error = WorkerError(
                f"rank {self.rank}, {self._now().at}: the other ranks gave this rank up: {loss.reason}"
            )
        else:
            kind = InvalidRun if loss.is_input_wrong and self._process is not None else PeerLost
            error = kind(f"{_sentence(loss)} Rank {self.rank} needed it in {self._now().at}.")
        attach_progress(error, Progress(at.step, at.action, None if loss.rank == self.rank else loss.rank))
        return error

    def _unusable(self, what: str) -> WorkerError:
        if self.is_closed:
            return WorkerError(f"rank {self.rank}, {what}: this pipeline is closed. Make a new one.")
        why = "" if self._loss is None else f" (rank {self._loss.rank}: {self._loss.reason.rstrip('.')})"
        return WorkerError(
            f"rank {self.rank}, {what}: this pipeline has failed in an earlier call{why}. Make a new one; "
            f"every rank must take part."
        )

    def _fail(self, error: BaseException) -> BaseException:
        """End the pipeline, and the process if it is the worker's own; returns the error to raise."""
        if self._process is None:
            if self.has_failed or self.is_closed:
                return error
            error = self._conclude(error)
            self._break()
            self.stop_watching()
            if self._may_close:
                self.close_transport()
            else:
                self._leave_open("did not end their operations", ABORT_SECONDS)
            self.on_end()
            return error
        self._failing.acquire()  # never released: the first failure ends the process
        # A thread of C that needs no lock of Python's interpreter, so an abort that blocks cannot stop it.
        faulthandler.dump_traceback_later(LEAVE_SECONDS, exit=True)
        status = 1
        try:
            if isinstance(error, KeyboardInterrupt):
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # torchrun and the terminal may both send it
                error = Interrupted(f"rank {self.rank} was interrupted.")
            # First, because another rank that reads the cause ends, and an agent may then end this process.
            self._try_to_record(self._process, error)
            blamed = self._conclude(error)
            if blamed is not error:
                self._try_to_record(self._process, blamed)
            status = self._process.report(blamed)
            if self.rank:
                with suppress(ConnectionError):  # of the ranks' store: it may have ended with rank 0
                    self._notes.needs_no_more()
            self._break()
            if self.rank == 0 and lives_in_rank_0():
                self._wait_for_readers()
        finally:
            leave(status)

    def _try_to_record(self, process: OwnProcess, error: BaseException) -> None:
        try:
            process.record(error)
        except OSError as obstacle:  # the other ranks must learn the cause all the same
            say(f"the reason of the failure could not be written: {obstacle}")

    def _conclude(self, error: BaseException) -> BaseException:
        """Find and publish the rank to blame; returns the error to raise or report."""
        loss = self._watched_loss
        if loss is not None and isinstance(error, Exception):
            error = self._lost(loss)  # the broken connections have caused it
        elif isinstance(error, ChannelTimeout | PeerLost | TimeoutError | ConnectionError):
            error = self._named(error)
            loss = self._cause(error)
            if loss is not None and loss.rank != self.rank and str(loss) not in str(error):
                blamed = type(error)(f"{_sentence(loss)} {error}")
                attach_progress(blamed, progress_of_error(error) or self.progress.read())
                error = blamed
        if loss is None:
            reason = str(error) if isinstance(error, WorkerError) else describe_error(error)
            is_input_wrong = isinstance(error, InvalidRun | Disagreement)
            loss = Loss(self.rank, reason.strip().rstrip(".").replace("\n", " "), is_input_wrong)
        self.has_failed, self._loss = True, loss
        with suppress(ConnectionError):  # of the ranks' store: it may have ended with rank 0
            self._notes.publish(loss)
        return error

    def _wait_for_readers(self) -> None:
        """Keep the ranks' store, which lives in this process, until the others have read the reason.

        A rank that is to blame gets little time, because it may be gone.
        """
        begun, lost = time.monotonic(), None if self._loss is None else self._loss.rank
        while readers := self._notes.readers(range(1, self._layout.world_size)):
            seconds = 2 * BEAT_SECONDS if readers == [lost] else ABORT_SECONDS
            if time.monotonic() - begun > seconds:
                break
            time.sleep(_POLL_SECONDS)

    def _named(
        self, error: ChannelTimeout | PeerLost | TimeoutError | ConnectionError
    ) -> ChannelTimeout | PeerLost:
        """A transport's error as the worker's."""
        if isinstance(error, ChannelTimeout | PeerLost):
            return error
        kind = ChannelTimeout if isinstance(error, TimeoutError) else PeerLost
        named = kind(f"rank {self.rank}, {self.progress.doing}: {str(error).rstrip('.')}.")
        named.__cause__ = error
        return named

    def _cause(self, error: ChannelTimeout | PeerLost) -> Loss | None:
        """The rank to blame for a wait, which is not always the one that this rank waited for."""
        at = progress_of_error(error)
        peer = self.progress.waiting_for if at is None else at.peer
        try:
            if self._watch is None:
                return self._published()
            if peer is None:
                return self._notes.silent_one(self._layout.world_size)
            return self._notes.cause(peer)
        except ConnectionError as gone:  # of the ranks' store
            return None if self._process is None else Loss(0, str(gone))

    def _published(self) -> Loss | None:
        """The published reason; waits a moment for it, because connections may break before it is there."""
        deadline = time.monotonic() + _READ_SECONDS
        while (loss := self._notes.first()) is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return loss

    def _break(self) -> None:
        """End all waits of this rank and of its peers, once; from any thread."""
        with self._breaking:
            if self._is_broken:
                return
            self._is_broken = True
            if self._transport is not None:
                self._may_close = self._transport.abort(ABORT_SECONDS)
            self._control.abort()

    def _leave_open(self, what: str, seconds: float) -> None:
        """Say that the connections stay open, and limit the interpreter's exit, which may wait for them."""
        say(
            f"rank {self.rank}: its connections {what} within {seconds:g} s; they stay open. When Python "
            f"exits, the process ends after at most {LEAVE_SECONDS:g} s more."
        )
        if threading.main_thread().is_alive():
            atexit.register(_limit_exit)
        else:
            _limit_exit()


def _sentence(loss: Loss) -> str:
    return f"{str(loss).rstrip('.')}."


def _limit_exit() -> None:
    """End the process after a while, from a thread of C that needs no lock of Python's interpreter."""
    faulthandler.dump_traceback_later(LEAVE_SECONDS, exit=True)
