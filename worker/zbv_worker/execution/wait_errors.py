"""What a rank says when it waited in vain: where it stood, what for, and whom to look at."""

from __future__ import annotations

from zbv_solver.plans.channels import Transfer

from zbv_worker.errors import ChannelTimeout, PeerLost, WorkerError
from zbv_worker.execution.rank_plan import Instruction, Remote
from zbv_worker.execution.timeline import Overdue
from zbv_worker.transport.channels import ChannelKey


def send_failed(error: Exception, rank: int, instruction: Instruction) -> ChannelTimeout | PeerLost:
    """A transport's error of a send, which may be one that an earlier action started."""
    kind = ChannelTimeout if isinstance(error, TimeoutError) else PeerLost
    return kind(f"rank {rank} at {instruction.action}: an earlier send failed ({error}).")


def not_received(
    error: Exception, rank: int, instruction: Instruction, timeout: float
) -> ChannelTimeout | PeerLost:
    """A transport's error of the receive of an action's input."""
    what, peer = _what(instruction), instruction.peer
    if isinstance(error, TimeoutError):
        return ChannelTimeout(
            f"rank {rank} waited {timeout:g} s at {instruction.action} for {what}, and it did not come. See "
            f"what rank {peer} does; if it is merely slow, raise --timeout."
        )
    return PeerLost(
        f"rank {rank} waited at {instruction.action} for {what}, and the connection broke ({error}). Look at "
        f"why rank {peer} ended."
    )


def overdue(found: Overdue, rank: int, timeout: float) -> WorkerError:
    """A GPU that stands still: for want of a tensor, or in the rank's own work."""
    instruction = found.instruction
    if instruction.peer is not None and not found.started:
        return not_received(TimeoutError(), rank, instruction, timeout)
    return WorkerError(
        f"rank {rank}: its GPU was not done with {instruction.action} after {timeout:g} s. If its work takes "
        f"so long, raise --timeout; else a kernel or a collective inside the stage hangs."
    )


def _what(instruction: Instruction) -> str:
    source = instruction.source
    if not isinstance(source, Remote):
        return "its input"
    producer = _producer(source.channel, source.transfer)
    return f"the {source.channel.kind} of {producer} from rank {instruction.peer}"


def _producer(key: ChannelKey, transfer: Transfer) -> str:
    if key.kind == "activation":
        return f"{transfer.boundary}F{transfer.microbatch}"
    return f"stage {transfer.boundary + 1}, microbatch {transfer.microbatch}"
