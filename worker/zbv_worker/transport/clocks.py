"""How far the ranks' clocks are apart, found by exchanging pings with rank 0.

Rank 0 notes its time, a peer answers with its own, rank 0 notes the time again. If the message took as long
there as back, the peer answered in the middle. It did not, quite; but it did answer between the two, so the
offset is wrong by at most half of the round trip, and of several exchanges the shortest says most (Cristian,
"Probabilistic clock synchronization", 1989).

Clocks of different hosts also run at slightly different speeds. So offsets are found before and after what
is to be compared, and change evenly in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from zbv_worker.transport.channels import Transport

Clock = Callable[[], int]
"""A rank's clock, in nanoseconds: monotonic, from any origin."""

DEFAULT_CLOCK: Clock = time.perf_counter_ns
DEFAULT_EXCHANGES = 20


@dataclass(frozen=True)
class Offset:
    """A rank's clock against rank 0's, in nanoseconds.

    Attributes
    ----------
    at
        When it was found, by the rank's own clock.
    ahead
        What the rank's clock shows more than rank 0's.
    uncertainty
        ``ahead`` is wrong by at most this: half of the shortest round trip.
    """

    at: int = 0
    ahead: int = 0
    uncertainty: int = 0


_OFFSETS = TypeAdapter(tuple[Offset, ...])


@dataclass(frozen=True)
class Alignment:
    """Translates every rank's times to rank 0's clock.

    Attributes
    ----------
    before, after
        Offsets by rank, as they were found at two times.
    """

    before: tuple[Offset, ...]
    after: tuple[Offset, ...]

    def to_rank_0(self, rank: int, times: NDArray[np.int64]) -> NDArray[np.int64]:
        """Times of a rank's clock, in nanoseconds and of any shape, as rank 0's clock showed them."""
        first, last = self.before[rank], self.after[rank]
        elapsed = last.at - first.at
        # Whole numbers until the last step: a float has no room for nanoseconds since the host's start.
        drift = (last.ahead - first.ahead) / elapsed if elapsed > 0 else 0.0
        moved = np.rint((times - first.at) * drift).astype(np.int64)
        aligned: NDArray[np.int64] = times - first.ahead - moved
        return aligned

    @property
    def uncertainty(self) -> int:
        """Nanoseconds by which an aligned time may be wrong, at worst."""
        return max(offset.uncertainty for offset in (*self.before, *self.after))


def find_offsets(
    transport: Transport,
    timeout: float,
    clock: Clock = DEFAULT_CLOCK,
    exchanges: int = DEFAULT_EXCHANGES,
) -> tuple[Offset, ...]:
    """Every rank's offset, by rank; the same answer on all ranks. Collective.

    Parameters
    ----------
    timeout
        Seconds to wait for any one message.

    Raises
    ------
    TimeoutError, ConnectionError
        When a rank does not take part.
    """
    transport.barrier(timeout)  # a peer that is busy elsewhere would seem to be far away
    found = None
    if transport.rank == 0:
        peers = range(1, transport.world_size)
        found = (Offset(at=clock()), *(_ask(transport, peer, timeout, clock, exchanges) for peer in peers))
    else:
        for _ in range(exchanges):
            transport.hear(0, timeout)
            transport.tell(0, clock(), timeout)
    said = None if found is None else _OFFSETS.dump_python(found, mode="json")
    return _OFFSETS.validate_python(transport.gather(said, timeout)[0])


def _ask(transport: Transport, peer: int, timeout: float, clock: Clock, exchanges: int) -> Offset:
    """The offset of one peer, from the shortest of several exchanges."""
    best: tuple[int, Offset] | None = None
    for _ in range(exchanges):
        asked = clock()
        transport.tell(peer, asked, timeout)
        answer = transport.hear(peer, timeout)
        round_trip = clock() - asked
        if best is None or round_trip < best[0]:
            ahead = answer - asked - round_trip // 2
            best = round_trip, Offset(at=answer, ahead=ahead, uncertainty=-(-round_trip // 2))
    if best is None:
        raise ValueError(f"found {exchanges} exchanges; there must be at least one.")
    return best[1]
