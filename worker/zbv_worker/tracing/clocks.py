"""Offsets between the ranks' clocks, measured by pings with rank 0.

Rank 0 reads its clock, a peer answers with its own, rank 0 reads its clock again. The peer's answer is
assumed to lie in the middle of the round trip; the offset is wrong by at most half of it. Of several
exchanges, the one with the shortest round trip is the most precise (Cristian, "Probabilistic clock
synchronization", 1989).

Clocks of different hosts also run at slightly different speeds. So offsets are measured before and after the
interval of interest and interpolated linearly in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from zbv_worker.transport.channels import Transport

Clock = Callable[[], int]
"""A rank's clock in nanoseconds: monotonic, with any origin."""

DEFAULT_CLOCK: Clock = time.perf_counter_ns
DEFAULT_EXCHANGES = 20


@dataclass(frozen=True)
class Offset:
    """The offset of a rank's clock from rank 0's, in nanoseconds."""

    at: int = 0
    """The rank's own clock when the offset was measured."""
    ahead: int = 0
    """The rank's clock minus rank 0's."""
    uncertainty: int = 0
    """The largest error of ``ahead``: half of the shortest round trip."""


_OFFSETS = TypeAdapter(tuple[Offset, ...])


@dataclass(frozen=True)
class Alignment:
    """Converts every rank's times to rank 0's clock."""

    before: tuple[Offset, ...]
    after: tuple[Offset, ...]
    """Offsets by rank, measured at two times."""

    def to_rank_0(self, rank: int, times: NDArray[np.int64]) -> NDArray[np.int64]:
        """Convert times of a rank's clock (nanoseconds, any shape) to rank 0's clock."""
        first, last = self.before[rank], self.after[rank]
        elapsed = last.at - first.at
        # Integers until the last step: a float cannot hold nanoseconds since the host's start exactly.
        drift = (last.ahead - first.ahead) / elapsed if elapsed > 0 else 0.0
        moved = np.rint((times - first.at) * drift).astype(np.int64)
        aligned: NDArray[np.int64] = times - first.ahead - moved
        return aligned

    @property
    def uncertainty(self) -> int:
        """The largest error of an aligned time, in nanoseconds."""
        return max(offset.uncertainty for offset in (*self.before, *self.after))


def find_offsets(
    transport: Transport,
    timeout: float,
    clock: Clock = DEFAULT_CLOCK,
    exchanges: int = DEFAULT_EXCHANGES,
) -> tuple[Offset, ...]:
    """Measure every rank's offset; returns them by rank, identical on all ranks. Collective.

    Parameters
    ----------
    timeout
        Seconds to wait for any one message.

    Raises
    ------
    TimeoutError, ConnectionError
        If a rank does not take part.
    """
    transport.barrier(timeout)  # without it, a busy peer's answer would be late
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
    """Measure the offset of one peer, from the shortest of several exchanges."""
    answers: list[tuple[int, Offset]] = []
    for _ in range(exchanges):
        asked = clock()
        transport.tell(peer, asked, timeout)
        answer = transport.hear(peer, timeout)
        round_trip = clock() - asked
        ahead = answer - asked - round_trip // 2
        answers.append((round_trip, Offset(at=answer, ahead=ahead, uncertainty=-(-round_trip // 2))))
    return min(answers, key=itemgetter(0))[1]
