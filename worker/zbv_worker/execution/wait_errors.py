"""Errors of a rank that waited without success: where it waited, what for, and which peer to look at."""

from __future__ import annotations

from collections.abc import Sequence

from zbv_worker.errors import ChannelTimeout, PeerLost, WorkerError
from zbv_worker.execution.rank_plan import Instruction, Remote
from zbv_worker.execution.timeline import Overdue, Patience
from zbv_worker.failures.progress import Place


def send_failed(error: Exception, rank: int, instruction: Place) -> ChannelTimeout | PeerLost:
    """Convert a transport's error of a send, which an earlier action may have started."""
    kind = ChannelTimeout if isinstance(error, TimeoutError) else PeerLost
    return kind(f"rank {rank} at {instruction.action}: an earlier send failed ({error}).")


def not_received(
    error: Exception, rank: int, instruction: Instruction, patience: Patience
) -> ChannelTimeout | PeerLost:
    """Convert a transport's error of receiving an action's input."""
    what, peer = _what(instruction), instruction.peer
    if isinstance(error, TimeoutError):
        return ChannelTimeout(
            f"rank {rank} waited {patience.seconds:g} s at {instruction.action} for {what}, which did not "
            f"arrive. Check rank {peer}; if it is only slow, raise {patience.option}."
        )
    return PeerLost(
        f"rank {rank} waited at {instruction.action} for {what}, and the connection broke ({error}). Check "
        f"why rank {peer} ended."
    )


def overdue(found: Overdue, rank: int, siblings: Sequence[int] = ()) -> WorkerError:
    """The error of a GPU that makes no progress: it lacks a tensor, or hangs in the rank's own work.

    An update may wait for any rank, in a sum, and an action for a sibling, in a gather of parameters. So it
    is a peer's failure until none is found silent.

    Parameters
    ----------
    siblings
        The ranks of other replicas that hold the same stages.
    """
    _, step, instruction, _, _, patience = found.work
    if instruction is None:
        return ChannelTimeout(
            f"rank {rank}: its GPU did not complete the update after step {step} within "
            f"{patience.seconds:g} s. A sum over ranks may wait for a rank that does not take part; check "
            f"the other ranks. If it takes that long, raise {patience.option}."
        )
    if instruction.peer is not None and not found.started:
        return not_received(TimeoutError(), rank, instruction, patience)
    if siblings:
        return ChannelTimeout(
            f"rank {rank}: its GPU did not complete {instruction.action} within {patience.seconds:g} s. With "
            f"--shard, it may wait for the parameters of rank {' or '.join(map(str, siblings))}, which "
            f"{'holds' if len(siblings) == 1 else 'hold'} the same stages; check whether it ended. If the "
            f"action takes that long, raise {patience.option}."
        )
    return WorkerError(
        f"rank {rank}: its GPU did not complete {instruction.action} within {patience.seconds:g} s. If it "
        f"takes that long, raise {patience.option}; otherwise a kernel or a collective inside the stage "
        f"hangs."
    )


def _what(instruction: Instruction) -> str:
    """The tensor that an action waits for, named by its producer."""
    source = instruction.source
    if not isinstance(source, Remote):
        return "its input"
    transfer = source.transfer
    boundary, microbatch = transfer.boundary, transfer.microbatch
    if transfer.kind == "activation":
        return f"the activation of {boundary}F{microbatch} from rank {instruction.peer}"
    return f"the gradient of stage {boundary + 1}, microbatch {microbatch} from rank {instruction.peer}"
