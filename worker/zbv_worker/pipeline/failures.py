"""Errors of a pipeline's ranks, inside a process that belongs to the user.

Nothing here ends the process. The first rank that fails publishes the reason and closes its connections, so
that its peers fail soon too, with that reason.
"""

from __future__ import annotations

import atexit
import faulthandler
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress

import torch

from zbv_worker.errors import ChannelTimeout, PeerLost, WorkerError, describe_error
from zbv_worker.execution.progress import CurrentProgress, progress_of_error
from zbv_worker.transport.connected import ABORT_SECONDS, ConnectedTransport
from zbv_worker.transport.failure_watch import (
    SILENT_SECONDS,
    Doing,
    FailureNotes,
    FailureWatch,
    Loss,
    Notes,
)
from zbv_worker.transport.gloo_control import GlooControl
from zbv_worker.transport.rendezvous import say

_READ_SECONDS, _POLL_SECONDS = 1.0, 0.05
"""How long a rank that lost a peer waits for the reason that another rank publishes."""

_LEAST_PATIENCE = 30.0
"""A rank may be silent this long: code of the user may keep the interpreter busy."""
CLOSE_SECONDS = 30.0
"""How long connections may take to close. NCCL has no limit."""


class Failures:
    """The failures of one rank's pipeline.

    Attributes
    ----------
    progress
        Where the rank is, and which rank it waits for; others read it in its signs of life.
    on_end
        Called once, after a failure. Must not refer to the pipeline, which would then never be freed.
    """

    def __init__(self, transport: ConnectedTransport):
        self._rank = transport.rank
        self._notes = FailureNotes(transport, transport.rank)
        self._transport = transport
        self.on_end: Callable[[], None] = lambda: None
        self.has_failed = self.is_closed = False
        self._loss: Loss | None = None
        self._watched_loss: Loss | None = None
        self._doing = "starting"
        self.progress = CurrentProgress()
        self._watch: FailureWatch | None = None
        self._breaking = threading.Lock()
        self._is_broken, self._may_close = False, True

    def watch_others(self, timeout: float) -> None:
        """Watch the other ranks, if there are any, through an own connection to their store."""
        control = self._transport.control
        if isinstance(control, GlooControl) and control.layout.world_size > 1:
            self.watch(control.other_notes(), timeout)

    def watch(self, notes: Notes, timeout: float) -> None:
        """Watch the other ranks from a thread until the pipeline ends.

        A failure of another rank breaks this rank's connections, so that its waits end.

        Parameters
        ----------
        notes
            The notes, through a connection that no other thread uses.
        timeout
            A rank without a sign of life for somewhat longer is lost.
        """
        patience = max(timeout, _LEAST_PATIENCE) + 2 * SILENT_SECONDS
        following = (self._rank + 1) % self._transport.layout.world_size
        # Without the store of a rank 0 that has left, the last step may still succeed; waits have limits.
        self._watch = FailureWatch(
            FailureNotes(notes, self._rank),
            following,
            patience,
            lambda: Doing(self._doing, self.progress.waiting_for),
            self._lose,
            needs_store=False,
        )
        self._watch.start()

    def stop_watching(self) -> None:
        """Stop to watch, before this rank leaves. The others then expect no sign of life from it."""
        watch, self._watch = self._watch, None
        if watch is not None:
            with suppress(ConnectionError):  # of the ranks' store: it may have ended with rank 0
                watch.stop()

    def close_transport(self) -> None:
        """Close the connections; gives up after :data:`CLOSE_SECONDS`.

        If it gives up, the interpreter's exit has the same limit: torch may wait for the connections there.
        """
        closing = threading.Thread(target=self._transport.close, name="zbv-close", daemon=True)
        try:
            closing.start()
        except RuntimeError:  # since Python 3.12, the interpreter starts no threads while it exits
            _limit_exit()
            self._transport.close()
            faulthandler.cancel_dump_traceback_later()
            return
        closing.join(CLOSE_SECONDS)
        if not closing.is_alive():
            return
        self._leave_open("did not close", CLOSE_SECONDS)

    def _leave_open(self, what: str, seconds: float) -> None:
        """Say that the connections stay open, and limit the interpreter's exit, which may wait for them."""
        say(
            f"rank {self._rank}: its connections {what} within {seconds:g} s; they stay open. When Python "
            f"exits, the process ends after at most {CLOSE_SECONDS:g} s more."
        )
        if threading.main_thread().is_alive():
            atexit.register(_limit_exit)
        else:
            _limit_exit()

    def _lose(self, loss: Loss) -> None:
        self._watched_loss = loss
        self._break()

    def _break(self) -> None:
        """End all waits of this rank and of its peers, once; from any thread."""
        with self._breaking:
            if not self._is_broken:
                self._is_broken = True
                self._may_close = self._transport.abort(ABORT_SECONDS)
                self._transport.control.abort()

    @contextmanager
    def watched(self, what: str) -> Iterator[None]:
        """A block that needs the other ranks.

        Raises
        ------
        ChannelTimeout, PeerLost
            If a peer failed, with the reason of the rank that failed first.
        WorkerError
            If the pipeline is closed, or has failed before.
        """
        if self.is_closed:
            raise WorkerError(f"rank {self._rank}, {what}: this pipeline is closed. Make a new one.")
        if self.has_failed:
            loss = self._loss
            why = "" if loss is None else f" (rank {loss.rank}: {loss.reason.rstrip('.')})"
            raise WorkerError(
                f"rank {self._rank}, {what}: this pipeline has failed in an earlier call{why}. Make a new "
                f"one; every rank must take part."
            )
        # Tensors that are made in inference mode, and kept, could not be used in training.
        outside = torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
        self._doing = what
        if self._watched_loss is not None:
            raise self._lost(what)
        try:
            with outside:
                yield
        except (ChannelTimeout, PeerLost) as error:
            blamed = self._blamed(error, what)
            if blamed is error:
                raise
            raise blamed from None  # the other rank's log has the trace that matters
        except (TimeoutError, ConnectionError) as error:
            kind = ChannelTimeout if isinstance(error, TimeoutError) else PeerLost
            raise self._blamed(kind(f"rank {self._rank}, {what}: {str(error).rstrip('.')}."), what) from error
        except BaseException as error:
            if isinstance(error, Exception) and self._watched_loss is not None:
                raise self._lost(what) from error  # the broken connections have caused it
            self.end(error)
            raise
        finally:
            self._doing, self.progress.waiting_for = "code outside of the pipeline", None

    def _lost(self, what: str) -> PeerLost:
        """End the pipeline because of a failure that the watch found."""
        loss = self._watched_loss
        assert loss is not None
        self._end(loss)
        return PeerLost(f"{str(loss).rstrip('.')}. Rank {self._rank} needed it in {what}.")

    def end(self, error: BaseException) -> None:
        """End the pipeline on all ranks because of an error of this one."""
        reason = str(error) if isinstance(error, WorkerError) else describe_error(error)
        self._end(Loss(self._rank, reason))

    def _blamed(self, error: ChannelTimeout | PeerLost, what: str) -> ChannelTimeout | PeerLost:
        """The error of a peer, with the reason that the first failed rank has published."""
        loss = self._first()
        cause = self._cause(error) if loss is None else None
        self._end(loss or cause or Loss(self._rank, str(error)))
        if cause is not None and cause.rank != self._rank:
            return type(error)(f"{str(cause).rstrip('.')}. {error}")
        if loss is None or loss.rank == self._rank:
            return error
        return type(error)(f"{str(loss).rstrip('.')}. Rank {self._rank} needed it in {what}.")

    def _cause(self, error: ChannelTimeout | PeerLost) -> Loss | None:
        """The rank to blame for a wait, which is not always the one that this rank waited for."""
        at = progress_of_error(error)
        if self._watch is None or at is None or at.peer is None:
            return None
        with suppress(ConnectionError):  # of the ranks' store
            return self._notes.cause(at.peer)
        return None

    def _first(self) -> Loss | None:
        """The published reason; waits a moment for it, because connections may break before it is there."""
        deadline = time.monotonic() + _READ_SECONDS
        with suppress(ConnectionError):
            while (found := self._notes.first()) is None and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            return found
        return None

    def _end(self, loss: Loss) -> None:
        if self.has_failed or self.is_closed:
            return
        self.has_failed, self._loss = True, loss
        with suppress(ConnectionError):  # of the ranks' store: it may have ended with rank 0
            self._notes.publish(loss)
        self._break()
        self.stop_watching()
        if self._may_close:
            self.close_transport()
        else:
            self._leave_open("did not end their operations", ABORT_SECONDS)
        self.on_end()


def _limit_exit() -> None:
    """End the process after a while, from a thread of C that needs no lock of Python's interpreter."""
    faulthandler.dump_traceback_later(CLOSE_SECONDS, exit=True)
