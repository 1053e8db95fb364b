"""Errors of a pipeline's ranks, inside a process that belongs to the user.

Nothing here ends the process. The first rank that fails publishes the reason and closes its connections, so
that its peers fail soon too, with that reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress

import torch

from zbv_worker.errors import ChannelTimeout, PeerLost, WorkerError, describe_error
from zbv_worker.transport.connected import ABORT_SECONDS, ConnectedTransport
from zbv_worker.transport.failure_watch import FailureNotes, Loss

_READ_SECONDS, _POLL_SECONDS = 1.0, 0.05
"""How long a rank that lost a peer waits for the reason that another rank publishes."""


class Failures:
    """The failures of one rank's pipeline.

    Attributes
    ----------
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
            self.end(error)
            raise

    def end(self, error: BaseException) -> None:
        """End the pipeline on all ranks because of an error of this one."""
        reason = str(error) if isinstance(error, WorkerError) else describe_error(error)
        self._end(Loss(self._rank, reason))

    def _blamed(self, error: ChannelTimeout | PeerLost, what: str) -> ChannelTimeout | PeerLost:
        """The error of a peer, with the reason that the first failed rank has published."""
        loss = self._first()
        self._end(loss or Loss(self._rank, str(error)))
        if loss is None or loss.rank == self._rank:
            return error
        return type(error)(f"{str(loss).rstrip('.')}. Rank {self._rank} needed it in {what}.")

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
        self._transport.abort(ABORT_SECONDS)
        self._transport.control.abort()
        self._transport.close()
        self.on_end()
