"""Which communicators of NCCL a rank has: their options, their number, and the order of connecting them."""

from __future__ import annotations

from collections.abc import Iterable

from zbv_worker.transport.channels import ChannelKey
from zbv_worker.transport.torch_api import GroupOptions

CHANNEL_OPTIONS = GroupOptions(max_ctas=4)
"""A waiting receive occupies the multiprocessors of its thread blocks, which compute then cannot use."""
SUM_OPTIONS = GroupOptions()
"""Sums over replicas wait for ranks in the same position, so not for long; they may use NCCL's full width."""

MAX_COMMUNICATORS = 28
"""Of a process. torch has 32 streams per GPU and priority, and gives them out in turn (``CUDAStream.h``);
this leaves 3 for ``fully_shard`` and 1 more."""
NCCL_LOOK_AHEAD = 1
"""Receives posted ahead per channel. The first on a communicator waits on the device and occupies
multiprocessors; further ones wait in its stream and would only hold buffers, because the host queues actions
ahead of the device and so posts the next receive early enough."""


def greeting_order(keys: Iterable[ChannelKey]) -> list[ChannelKey]:
    """The order in which all ranks connect channels.

    Connecting blocks both ends, so the order is a greedy edge colouring: channels of one round have no rank
    in common and connect at the same time. No order of channels that is equal on all ranks can deadlock: of
    the channels not yet connected, the first is next for both its ends.
    """
    busy: dict[int, set[int]] = {}
    rounds = dict[ChannelKey, int]()
    for key in sorted(keys):
        taken = busy.setdefault(key.sender, set()) | busy.setdefault(key.receiver, set())
        rounds[key] = next(turn for turn in range(len(taken) + 1) if turn not in taken)
        busy[key.sender].add(rounds[key])
        busy[key.receiver].add(rounds[key])
    return sorted(rounds, key=lambda key: (rounds[key], key))


def kernels_at_once(
    keys: Iterable[ChannelKey],
    pp_rank: int,
    replicas: int = 1,
    *,
    sums_over_ranks: bool = False,
    ties: Iterable[tuple[int, ...]] = (),
) -> int:
    """The most communication kernels that wait on a rank's device at the same time: one per communicator.

    The device must run this many kernels in addition to compute, or a waiting receive could keep the send
    from running that its peer needs. Receives posted further ahead do not count: they queue behind the first
    on their communicator's stream. A middle rank of a V has 4, plus 1 with replicas, plus 1 with sums over
    all ranks, plus 1 per set of positions with tied parameters. CUDA offers 32 hardware queues
    (``CUDA_DEVICE_MAX_CONNECTIONS``).
    """
    channels = sum(pp_rank in (key.sender, key.receiver) for key in set(keys))
    return channels + (replicas > 1) + sums_over_ranks + sum(pp_rank in tie for tie in set(ties))
