"""Which sequences form a microbatch, and which replica runs it.

The *estimate* of an arrangement is that of its slowest replica, because all replicas wait for it. Large
microbatches save the fixed costs of an action and its transfer. Small ones shorten the ramps at both ends of
a step, and hold less memory for less time. The estimate knows the latter only in part, so there is a
candidate for each of several sizes, and their plans decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from math import ceil
from random import Random
from typing import NamedTuple

import numpy as np

from zbv_solver.kernels.jit import FloatArray
from zbv_solver.packing.step_costs import StepCosts

Contents = tuple[int, ...]
"""Indices of the sequences of a microbatch."""
Replicas = tuple[tuple[Contents, ...], ...]
"""Microbatches by replica."""
TRIES, MOST_TRIES = 40, 6000
"""Moves that the local search tries: per sequence, and at most."""
WITHIN = 0.2
"""Share of the moves that stay within the slowest replica, if there are several."""
EQUAL = 1e-5
"""Replicas are equal if the largest estimate exceeds the average by at most this share."""
ALONE = 0.2
"""Share of the moves that fill a new microbatch."""
SHARES = (1, 2, 3, 4, 6, 8)
"""Candidates have microbatches of the capacity divided by these."""
MOST_PER_REPLICA = 128
"""Microbatches of a replica: candidates with more are not tried. More of them take longer to plan."""
WORSE = 0.05
"""Candidates whose estimate exceeds the best by more than this share are not planned."""
_TINY = 1e-9
"""Relative to an estimate: smaller gains are rounding."""


class Microbatch(NamedTuple):
    """Sequences that run together."""

    contents: Contents
    moments: FloatArray
    """(6,), see :mod:`.step_costs`."""


@dataclass(frozen=True, eq=False)
class Packer:
    """What an arrangement is made of: the batch's sequences, and the costs and capacity of microbatches."""

    costs: StepCosts
    lengths: tuple[int, ...]
    """Of the batch's sequences, in tokens."""
    capacity: int
    """Most tokens of a microbatch with more than one sequence."""
    replicas: int
    """Number of replicas."""

    def microbatch(self, contents: Iterable[int]) -> Microbatch:
        """The microbatch of these sequences."""
        indices = tuple(contents)
        return Microbatch(indices, self.costs.moments(self.lengths[index] for index in indices))

    def fits(self, contents: Sequence[int]) -> bool:
        """Whether these sequences may form a microbatch; a single sequence always may."""
        lengths = [self.lengths[index] for index in contents]
        return len(lengths) < 2 or self.fits_sums(sum(lengths), sum(length * length for length in lengths))

    def fits_sums(self, tokens: int, squares: int) -> bool:
        """Whether several sequences may form a microbatch, by the sums of their lengths and squares."""
        return tokens <= self.capacity and self.costs.fits(tokens, squares)

    def estimate(self, microbatches: Sequence[Microbatch]) -> float:
        """The estimate of a replica's step."""
        return self.costs.step(np.array([microbatch.moments for microbatch in microbatches]))


@dataclass(frozen=True, eq=False)
class Arrangement:
    """One way to pack a batch."""

    packer: Packer
    """With the capacity that was used."""
    replicas: tuple[tuple[Microbatch, ...], ...]
    """Microbatches of every replica."""

    @classmethod
    def of(cls, packer: Packer, replicas: Iterable[Iterable[Sequence[int]]]) -> Arrangement:
        """The arrangement of these indices of sequences."""
        return cls(packer, tuple(tuple(map(packer.microbatch, contents)) for contents in replicas))

    @property
    def contents(self) -> Replicas:
        """Indices of sequences, by replica and microbatch."""
        return tuple(tuple(microbatch.contents for microbatch in replica) for replica in self.replicas)

    @property
    def microbatches(self) -> int:
        """Number of microbatches of all replicas together."""
        return sum(map(len, self.replicas))

    @cached_property
    def estimate(self) -> float:
        """The estimate of the slowest replica."""
        return max(map(self.packer.estimate, self.replicas))


def arrangements(packer: Packer, seed: int) -> list[Arrangement]:
    """Candidates, the smallest estimate first."""
    candidates = sorted(
        (improved(start, seed) for start in _by_size(packer)), key=lambda candidate: candidate.estimate
    )
    limit = candidates[0].estimate * (1 + WORSE)
    return [candidate for candidate in candidates if candidate.estimate <= limit]


def equal_tokens(packer: Packer) -> Replicas:
    """Consecutive sequences until the next one would exceed the largest microbatch, in the given order.

    This is what a loader does that packs to a fixed number of tokens without cutting sequences.
    """
    microbatches: list[list[int]] = [[]]
    for index in range(len(packer.lengths)):
        if not packer.fits([*microbatches[-1], index]):
            microbatches.append([])
        microbatches[-1].append(index)
    return dealt(packer, microbatches)


def dealt(packer: Packer, microbatches: Iterable[Sequence[int]]) -> Replicas:
    """Microbatch j on replica j modulo the number of replicas, as data loaders do.

    While there are fewer microbatches than replicas, the one with the most sequences is halved.
    """
    cards = [tuple(contents) for contents in microbatches]
    while len(cards) < packer.replicas:
        place = max(range(len(cards)), key=lambda place: (len(cards[place]), -place))
        half = len(cards[place]) // 2
        cards[place : place + 1] = [cards[place][:half], cards[place][half:]]
    return tuple(tuple(cards[replica :: packer.replicas]) for replica in range(packer.replicas))


def improved(start: Arrangement, seed: int, weights: Sequence[float] | None = None) -> Arrangement:
    """The arrangement after a local search; the estimate of replica r counts ``weights[r]`` times.

    A move changes a microbatch of the slowest replica, and one of any replica. It is kept if the largest
    estimate of these replicas falls, or if the sum of their estimates falls and the largest does not rise.
    The number of moves is fixed, so the result does not depend on the machine.
    """
    packer, random = start.packer, Random(seed)
    replicas, places = list(start.replicas), range(packer.replicas)
    weights = weights or [1.0] * packer.replicas
    estimates = [weights[place] * packer.estimate(replicas[place]) for place in places]
    for _ in range(min(MOST_TRIES, TRIES * len(packer.lengths))):
        slowest = max(places, key=estimates.__getitem__)
        if packer.replicas > 1 and estimates[slowest] <= (1 + EQUAL) * sum(estimates) / packer.replicas:
            break
        is_within = packer.replicas == 1 or random.random() < WITHIN
        other = slowest if is_within else random.choice([place for place in places if place != slowest])
        changed = _moved(packer, replicas, slowest, other, random)
        if changed is None:
            continue
        new = {place: weights[place] * packer.estimate(changed[place]) for place in changed}
        if _is_better(new.values(), [estimates[place] for place in changed]):
            for place in changed:
                replicas[place], estimates[place] = changed[place], new[place]
    return Arrangement(packer, tuple(replicas))


def _moved(
    packer: Packer, replicas: Sequence[tuple[Microbatch, ...]], slowest: int, other: int, random: Random
) -> dict[int, tuple[Microbatch, ...]] | None:
    """The microbatches of the replicas that a random move changes; None if it is not possible."""
    is_new = random.random() < ALONE
    ours = slowest, random.randrange(len(replicas[slowest]))
    theirs = other, len(replicas[other]) if is_new else random.randrange(len(replicas[other]))
    if ours == theirs:
        return None
    first = replicas[slowest][ours[1]].contents
    second = () if is_new else replicas[other][theirs[1]].contents
    contents = _exchanged(packer.lengths, first, second, random)
    if not all(map(packer.fits, contents)):
        return None
    changed = {
        place: [
            microbatch
            for index, microbatch in enumerate(replicas[place])
            if (place, index) not in (ours, theirs)
        ]
        for place in (slowest, other)
    }
    for place, indices in zip((slowest, other), contents, strict=True):
        if indices:
            changed[place].append(packer.microbatch(indices))
    if not all(changed.values()):
        return None
    return {place: tuple(microbatches) for place, microbatches in changed.items()}


def _exchanged(
    lengths: Sequence[int], first: Contents, second: Contents, random: Random
) -> tuple[Contents, Contents]:
    """Two microbatches after a random move. The second may be empty, and either may be empty afterwards.

    No single sequence moves into an empty one, because plans of tiny microbatches among others have bubbles.
    """
    move = random.choice(("swap", "send", "trade") if second else ("join", "halve"))
    if move == "swap":
        return second, first
    if move == "join":
        return (), first + second
    if move == "halve":  # every other sequence by length
        by_length = tuple(sorted(first + second, key=lambda index: (lengths[index], index)))
        return by_length[::2], by_length[1::2]
    ours = random.randrange(len(first))
    if move == "send":
        return first[:ours] + first[ours + 1 :], (*second, first[ours])
    theirs = random.randrange(len(second))
    return (
        (*first[:ours], second[theirs], *first[ours + 1 :]),
        (*second[:theirs], first[ours], *second[theirs + 1 :]),
    )


def _is_better(new: Iterable[float], old: Iterable[float]) -> bool:
    new, old = tuple(new), tuple(old)
    highest = max(old)
    if max(new) < highest * (1 - _TINY):
        return True
    return max(new) <= highest and sum(new) < sum(old) * (1 - _TINY)


def _by_size(packer: Packer) -> Iterator[Arrangement]:
    """Arrangements of microbatches with equal work, of several sizes."""
    tokens, counts = sum(packer.lengths), set[int]()
    for share in SHARES:
        smaller = replace(packer, capacity=max(1, packer.capacity // share))
        count = packer.replicas * ceil(tokens / smaller.capacity / packer.replicas)
        count = min(count, len(packer.lengths))
        if count in counts or (counts and count > MOST_PER_REPLICA * packer.replicas):
            continue
        counts.add(count)
        yield Arrangement(smaller, _distributed(smaller, _equal_work(smaller, count)))


def _equal_work(packer: Packer, count: int) -> list[list[int]]:
    """At least ``count`` microbatches: the longest sequence first, into the one with the least work.

    Among equal work, which costs without features cause, the one with the fewest tokens.
    """
    contents: list[list[int]] = [[] for _ in range(count)]
    sums = [(0, 0)] * count
    waiting = [(0.0, 0, place) for place in range(count)]
    for index in sorted(range(len(packer.lengths)), key=lambda index: (-packer.lengths[index], index)):
        length, full = packer.lengths[index], []
        while waiting:
            least = heappop(waiting)
            place = least[-1]
            tokens, squares = sums[place][0] + length, sums[place][1] + length * length
            if not contents[place] or packer.fits_sums(tokens, squares):
                break
            full.append(least)
        else:
            place, tokens, squares = len(contents), length, length * length
            contents.append([])
            sums.append((0, 0))
        contents[place].append(index)
        sums[place] = tokens, squares
        for entry in (*full, (packer.costs.work(tokens, squares), tokens, place)):
            heappush(waiting, entry)
    return [indices for indices in contents if indices]


def _distributed(packer: Packer, contents: Iterable[Sequence[int]]) -> tuple[tuple[Microbatch, ...], ...]:
    """Microbatches on replicas: the largest that remains on the replica with the smallest estimate.

    List scheduling with the longest first (Graham 1969).
    """
    microbatches = [packer.microbatch(indices) for indices in contents]
    microbatches.sort(key=lambda microbatch: (-packer.estimate([microbatch]), microbatch.contents))
    replicas: list[list[Microbatch]] = [[] for _ in range(packer.replicas)]
    estimates = [0.0] * packer.replicas
    for microbatch in microbatches:
        place = min(range(packer.replicas), key=lambda place: (estimates[place], len(replicas[place])))
        replicas[place].append(microbatch)
        estimates[place] = packer.estimate(replicas[place])
    return tuple(map(tuple, replicas))
