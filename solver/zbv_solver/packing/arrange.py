"""Arrangements of a batch: candidates with microbatches of several sizes, each improved by local search.

Large microbatches save the fixed costs of an action and its transfer. Small ones shorten the ramps at both
ends of a step, and hold less memory for less time. The estimate knows the latter only in part, so candidates
of several sizes are kept, and their plans decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import ceil
from random import Random

from zbv_solver.packing.arrangement import Microbatch, Packer, Replicas, contents_of
from zbv_solver.packing.local_search import LocalSearch
from zbv_solver.packing.rivals import RIVALS, by_length

TRIES, MOST_TRIES = 40, 6000
"""Moves that are tried for a candidate: per sequence, and at most."""
MOST_PER_REPLICA = 128
"""Microbatches of a replica: candidates with more are not tried. More of them take longer to plan."""
WORSE = 0.05
"""Candidates whose estimate exceeds the best by more than this share are not planned."""
STARTS = 2
"""Rivals whose packing, improved, is a candidate: those with the smallest estimates."""
_SHARES = (1, 2, 3, 4, 6, 8)
"""Candidates have microbatches of the capacity divided by these."""


@dataclass(frozen=True, eq=False)
class Arrangement:
    """One way to pack a batch.

    Attributes
    ----------
    packer
        With the capacity that was used.
    replicas
        Microbatches of every replica.
    estimate
        Of the slowest replica's step.
    """

    packer: Packer
    replicas: list[list[Microbatch]]
    estimate: float

    @property
    def contents(self) -> Replicas:
        """Indices of sequences, by replica and microbatch."""
        return contents_of(self.replicas)


def arrangements(packer: Packer, rivals: dict[str, Replicas], seed: int) -> list[Arrangement]:
    """Candidates, the smallest estimate first.

    It is no larger than that of any rival with at most ``MOST_PER_REPLICA`` microbatches per replica.
    """
    starts = [
        arranged(packer, replicas)
        for replicas in rivals.values()
        if max(map(len, replicas)) <= MOST_PER_REPLICA
    ]
    best = sorted(starts, key=lambda each: each.estimate)[:STARTS]
    found = sorted(
        (improved(each, seed) for each in (*best, *map(_no_larger, best), *_by_size(packer))),
        key=lambda each: each.estimate,
    )
    kept: dict[frozenset[tuple[int, ...]], Arrangement] = {}
    for each in found:
        if each.estimate <= found[0].estimate * (1 + WORSE):
            same = frozenset(tuple(sorted(own.contents)) for replica in each.replicas for own in replica)
            kept.setdefault(same, each)
    return list(kept.values())


def rival_packings(packer: Packer) -> dict[str, Replicas]:
    """The packings of the methods in :mod:`.rivals`, by name."""
    return {name: method(packer) for name, method in RIVALS.items()}


def arranged(packer: Packer, replicas: Sequence[Sequence[Sequence[int]]]) -> Arrangement:
    """A packing with its estimate."""
    made = [[packer.microbatch(contents) for contents in each] for each in replicas]
    return Arrangement(packer, made, max(map(packer.estimate, made)))


def improved(start: Arrangement, seed: int, weights: Sequence[float] | None = None) -> Arrangement:
    """The arrangement after a local search; the estimate of replica r counts ``weights[r]`` times."""
    search = LocalSearch(start.packer, start.replicas, weights)
    search.run(min(MOST_TRIES, TRIES * len(start.packer.lengths)), Random(seed))
    estimate = max(map(start.packer.estimate, search.replicas))
    return Arrangement(start.packer, search.replicas, estimate)


def _no_larger(start: Arrangement) -> Arrangement:
    """The arrangement; its microbatches must not grow beyond the largest that has several sequences."""
    tokens = [each.tokens for own in start.replicas for each in own if len(each.contents) > 1]
    return replace(start, packer=replace(start.packer, capacity=max(tokens, default=1)))


def _by_size(packer: Packer) -> Iterator[Arrangement]:
    """Arrangements of microbatches with equal work, of several sizes."""
    tokens = sum(packer.lengths)
    seen: set[int] = set()
    for share in _SHARES:
        capacity = max(1, packer.capacity // share)
        count = packer.replicas * ceil(tokens / capacity / packer.replicas)
        count = min(count, len(packer.lengths))
        if count in seen or (seen and count > MOST_PER_REPLICA * packer.replicas):
            continue
        seen.add(count)
        smaller = replace(packer, capacity=capacity)
        made = smaller.distributed(_equal_work(smaller, count))
        yield Arrangement(smaller, made, max(map(smaller.estimate, made)))


def _equal_work(packer: Packer, count: int) -> list[list[int]]:
    """At least ``count`` microbatches: the longest sequence first, into the one with the least work.

    Among equal work, which costs without features cause, the one with the fewest tokens.
    """
    made: list[list[int]] = [[] for _ in range(count)]
    sums = [(0, 0)] * count
    waiting = [(0.0, 0, place) for place in range(count)]
    for index in by_length(packer.lengths):
        length, full = packer.lengths[index], []
        while waiting:
            least = heappop(waiting)
            place = least[-1]
            tokens, squares = sums[place][0] + length, sums[place][1] + length * length
            if not made[place] or packer.fits(tokens, squares):
                break
            full.append(least)
        else:
            place, tokens, squares = len(made), length, length * length
            made.append([])
            sums.append((0, 0))
        made[place].append(index)
        sums[place] = tokens, squares
        for each in (*full, (packer.costs.work(tokens, squares), tokens, place)):
            heappush(waiting, each)
    return [contents for contents in made if contents]
