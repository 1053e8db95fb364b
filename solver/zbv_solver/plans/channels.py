"""What the ranks of a plan send to each other, and in which order.

Two tensors cross a stage boundary per microbatch: the activation, and its gradient in the other direction.
All tensors of one kind from one rank to another form a *channel*. Both ends of a channel must agree on the
order of its tensors, because some transports match sends and receives by order alone. The order is the one in
which the sender's list produces the tensors, so a rank needs no other knowledge about its peers to receive.

Orders are not checked here: see :mod:`zbv_solver.verify`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from zbv_solver.errors import InvalidInput
from zbv_solver.kernels.arrays import BoolArray
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import B, F, I, Problem

ChannelKind = Literal["activation", "gradient"]


@dataclass(frozen=True)
class Transfer:
    """One tensor that is sent from a rank to another.

    Attributes
    ----------
    boundary
        Boundary s is between stages s and s + 1. F of stage s produces the activation for F of stage s + 1;
        I or B of stage s + 1 produces the gradient for I or B of stage s.
    """

    boundary: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.boundary}:{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Transfer:
        """Read ``3:0``; raises :class:`InvalidInput` on anything else."""
        boundary, colon, microbatch = text.partition(":")
        if not (colon and all(part.isascii() and part.isdigit() for part in (boundary, microbatch))):
            raise InvalidInput.at(
                "", f"found {text!r}; a transfer is a boundary and a microbatch, as in '3:0'."
            )
        return cls(int(boundary), int(microbatch))


@dataclass(frozen=True)
class Channel:
    """All transfers of one kind from one rank to another, in the order in which the sender produces them."""

    sender: int
    receiver: int
    kind: ChannelKind
    transfers: tuple[Transfer, ...]


def channels(problem: Problem, orders: Orders) -> tuple[Channel, ...]:
    """Every channel of a plan, sorted by sender, receiver and kind.

    Boundaries inside one rank need no transfer. ``orders`` must be complete and correctly placed; see
    :func:`zbv_solver.verify.verifier.verify_orders`.
    """
    ranks = np.array(problem.placement.rank_of, dtype=np.int32)
    forward = orders.letter == F
    backward = (orders.letter == I) | (orders.letter == B)
    found = [
        *_channels_of_kind("activation", orders, forward & (orders.stage < problem.n_stages - 1), ranks, 1),
        *_channels_of_kind("gradient", orders, backward & (orders.stage > 0), ranks, -1),
    ]
    return tuple(sorted(found, key=lambda channel: (channel.sender, channel.receiver, channel.kind)))


def channels_of(rank: int, all_channels: Iterable[Channel]) -> tuple[Channel, ...]:
    """The channels that a rank sends or receives on."""
    return tuple(channel for channel in all_channels if rank in (channel.sender, channel.receiver))


def _channels_of_kind(
    kind: ChannelKind, orders: Orders, producing: BoolArray, ranks: NDArray[np.int32], step: int
) -> list[Channel]:
    """Channels of the tensors from a producing action's stage to the stage at distance ``step``."""
    stage = orders.stage[producing]
    microbatch = orders.microbatch[producing]
    sender, receiver = ranks[stage], ranks[stage + step]
    crossing = sender != receiver
    # The flat arrays have each rank's actions in execution order, and the selection keeps that order.
    pairs = np.stack([sender[crossing], receiver[crossing]], axis=1)
    boundary = np.minimum(stage, stage + step)[crossing].tolist()
    moved = microbatch[crossing].tolist()
    grouped: dict[tuple[int, int], list[Transfer]] = {}
    for (source, target), at, j in zip(pairs.tolist(), boundary, moved, strict=True):
        grouped.setdefault((source, target), []).append(Transfer(at, j))
    return [
        Channel(source, target, kind, tuple(transfers)) for (source, target), transfers in grouped.items()
    ]
