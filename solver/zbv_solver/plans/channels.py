"""What the ranks of a plan send to each other, and in which order.

Two tensors cross a stage boundary per microbatch: the activation, and its gradient in the other direction.
All tensors from one rank to another form a *channel*. Both ends of a channel must agree on the order of its
tensors, because some transports match sends and receives by order alone. The order is the one in which the
sender's list produces the tensors, so a rank needs no other knowledge about its peers to receive.

Activations and gradients share this order, and no deadlock follows from that. A rank posts the receives of a
channel in order, up to the tensor that its next action needs. The sender produced all tensors before that
one earlier in its list, so their receives never wait for anything that the needed tensor does not wait for.

Orders are not checked here: see :mod:`zbv_solver.verify`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from zbv_solver.errors import InvalidInput
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import F, Problem, W

TransferKind = Literal["activation", "gradient"]

_KIND_OF: dict[str, TransferKind] = {"A": "activation", "G": "gradient"}


class Transfer(NamedTuple):
    """One tensor that is sent from a rank to another. A tuple, because every action of a rank looks it up."""

    kind: TransferKind
    boundary: int
    """Boundary s is between stages s and s + 1. F of stage s produces the activation for F of stage s + 1; I
    or B of stage s + 1 produces the gradient for I or B of stage s."""
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind[0].upper()}{self.boundary}:{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Transfer:
        """Read ``A3:0`` or ``G3:0``; raises :class:`InvalidInput` on anything else."""
        kind = _KIND_OF.get(text[:1])
        boundary, colon, microbatch = text[1:].partition(":")
        if not (kind and colon and all(part.isascii() and part.isdigit() for part in (boundary, microbatch))):
            raise InvalidInput.at(
                "",
                f"found {text!r}; a transfer is A (activation) or G (gradient), a boundary and a microbatch, "
                "as in 'A3:0'.",
            )
        return cls(kind, int(boundary), int(microbatch))


@dataclass(frozen=True)
class Channel:
    """All transfers from one rank to another, in the order in which the sender produces them."""

    sender: int
    receiver: int
    transfers: tuple[Transfer, ...]


def channels(problem: Problem, orders: Orders) -> tuple[Channel, ...]:
    """Every channel of a plan, sorted by sender and receiver.

    Boundaries inside one rank need no transfer. ``orders`` must be complete and correctly placed; see
    :func:`zbv_solver.verify.verifier.verify_orders`.
    """
    rank_of = np.array(problem.placement.rank_of, dtype=np.int32)
    target = orders.stage + np.where(orders.letter == F, 1, -1)
    producing = (orders.letter != W) & (target >= 0) & (target < problem.n_stages)
    stage, target, microbatch = orders.stage[producing], target[producing], orders.microbatch[producing]
    produced = zip(
        *(array.tolist() for array in (rank_of[stage], rank_of[target], stage, target, microbatch)),
        strict=True,
    )
    # The flat arrays have each rank's actions in execution order, and the selection keeps that order.
    found: dict[tuple[int, int], list[Transfer]] = {}
    for sender, receiver, source, sink, j in produced:
        if sender != receiver:
            kind: TransferKind = "activation" if source < sink else "gradient"
            found.setdefault((sender, receiver), []).append(Transfer(kind, min(source, sink), j))
    return tuple(Channel(*ends, tuple(transfers)) for ends, transfers in sorted(found.items()))


def channels_of(rank: int, all_channels: Iterable[Channel]) -> tuple[Channel, ...]:
    """The channels that a rank sends or receives on."""
    return tuple(channel for channel in all_channels if rank in (channel.sender, channel.receiver))
