"""Improves an arrangement by moves that make its slowest replica faster.

A move takes place between the replica with the largest estimate and another one, or within the former. It
is kept if the larger of the two estimates falls, or if their sum falls and the larger one does not rise. The
number of moves that are tried is fixed, so the result does not depend on the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from zbv_solver.packing.arrangement import Microbatch, Packer

_TINY = 1e-9
"""Relative to an estimate: smaller gains are rounding."""

Exchange = tuple[list[Microbatch], list[Microbatch]]
"""The microbatches of two replicas after a move; of one replica if the second list is empty."""


class LocalSearch:
    """The state of a search.

    Attributes
    ----------
    replicas
        Microbatches of every replica.
    estimates
        Of every replica, multiplied by its weight.
    """

    def __init__(
        self, packer: Packer, replicas: Sequence[Sequence[Microbatch]], weights: Sequence[float] | None = None
    ) -> None:
        self.packer = packer
        self.replicas = [list(microbatches) for microbatches in replicas]
        self.weights = list(weights) if weights is not None else [1.0] * len(self.replicas)
        self.estimates = [self._estimate(place, own) for place, own in enumerate(self.replicas)]

    def run(self, tries: int, random: Random) -> None:
        """Try this many moves."""
        for _ in range(tries):
            slowest = max(range(len(self.replicas)), key=lambda place: self.estimates[place])
            if len(self.replicas) == 1 or random.random() < 0.2:
                self._within(slowest, random)
            else:
                other = random.randrange(len(self.replicas) - 1)
                self._between(slowest, other + (other >= slowest), random)

    def _estimate(self, place: int, microbatches: Sequence[Microbatch]) -> float:
        return self.weights[place] * self.packer.estimate(microbatches)

    def _between(self, slowest: int, other: int, random: Random) -> None:
        ours, theirs = self.replicas[slowest], self.replicas[other]
        move: Callable[..., Exchange | None] = random.choice(
            (self._give, self._swap, self._send, self._trade)
        )
        after = move(ours, theirs, random)
        if after is None:
            return
        old = self.estimates[slowest], self.estimates[other]
        new = self._estimate(slowest, after[0]), self._estimate(other, after[1])
        if _is_better(new, old):
            self.replicas[slowest], self.replicas[other] = after
            self.estimates[slowest], self.estimates[other] = new

    def _within(self, place: int, random: Random) -> None:
        move: Callable[..., list[Microbatch] | None] = random.choice((self._split, self._join, self._shift))
        after = move(self.replicas[place], random)
        if after is None:
            return
        new = self._estimate(place, after)
        if new < self.estimates[place] * (1 - _TINY):
            self.replicas[place], self.estimates[place] = after, new

    def _give(self, ours: list[Microbatch], theirs: list[Microbatch], random: Random) -> Exchange | None:
        """A microbatch goes to the other replica."""
        if len(ours) == 1:
            return None
        place = random.randrange(len(ours))
        return _without(ours, place), [*theirs, ours[place]]

    def _swap(self, ours: list[Microbatch], theirs: list[Microbatch], random: Random) -> Exchange | None:
        """Two microbatches change places."""
        mine, other = random.randrange(len(ours)), random.randrange(len(theirs))
        return [*_without(ours, mine), theirs[other]], [*_without(theirs, other), ours[mine]]

    def _send(self, ours: list[Microbatch], theirs: list[Microbatch], random: Random) -> Exchange | None:
        """A sequence goes into a microbatch of the other replica."""
        mine, other = random.randrange(len(ours)), random.randrange(len(theirs))
        sender, receiver = list(ours[mine].contents), list(theirs[other].contents)
        if len(sender) == 1 and len(ours) == 1:
            return None
        receiver.append(sender.pop(random.randrange(len(sender))))
        return self._replaced(ours, mine, sender, theirs, other, receiver)

    def _trade(self, ours: list[Microbatch], theirs: list[Microbatch], random: Random) -> Exchange | None:
        """Two sequences change places."""
        mine, other = random.randrange(len(ours)), random.randrange(len(theirs))
        sender, receiver = list(ours[mine].contents), list(theirs[other].contents)
        i, j = random.randrange(len(sender)), random.randrange(len(receiver))
        sender[i], receiver[j] = receiver[j], sender[i]
        return self._replaced(ours, mine, sender, theirs, other, receiver)

    def _replaced(
        self,
        ours: list[Microbatch],
        mine: int,
        sender: list[int],
        theirs: list[Microbatch],
        other: int,
        receiver: list[int],
    ) -> Exchange | None:
        """Two microbatches with other contents; None if one does not fit."""
        if not (self.packer.fits_all(receiver) and (not sender or self.packer.fits_all(sender))):
            return None
        left = [self.packer.microbatch(sender)] if sender else []
        return [*_without(ours, mine), *left], [*_without(theirs, other), self.packer.microbatch(receiver)]

    def _split(self, own: list[Microbatch], random: Random) -> list[Microbatch] | None:
        """A microbatch becomes two, of every other sequence by length."""
        place = random.randrange(len(own))
        ordered = sorted(own[place].contents, key=lambda index: (self.packer.lengths[index], index))
        if len(ordered) == 1:
            return None
        return [*_without(own, place), *map(self.packer.microbatch, (ordered[::2], ordered[1::2]))]

    def _join(self, own: list[Microbatch], random: Random) -> list[Microbatch] | None:
        """Two microbatches become one."""
        if len(own) == 1:
            return None
        one, other = sorted(random.sample(range(len(own)), 2))
        joined = [*own[one].contents, *own[other].contents]
        if not self.packer.fits_all(joined):
            return None
        return [*_without(_without(own, other), one), self.packer.microbatch(joined)]

    def _shift(self, own: list[Microbatch], random: Random) -> list[Microbatch] | None:
        """A sequence goes into another microbatch of the same replica."""
        if len(own) == 1:
            return None
        one, other = random.sample(range(len(own)), 2)
        sender, receiver = list(own[one].contents), list(own[other].contents)
        receiver.append(sender.pop(random.randrange(len(sender))))
        if not self.packer.fits_all(receiver):
            return None
        kept = [each for place, each in enumerate(own) if place not in (one, other)]
        return [*kept, *(self.packer.microbatch(contents) for contents in (sender, receiver) if contents)]


def _without(microbatches: list[Microbatch], place: int) -> list[Microbatch]:
    return microbatches[:place] + microbatches[place + 1 :]


def _is_better(new: tuple[float, float], old: tuple[float, float]) -> bool:
    highest = max(old)
    if max(new) < highest * (1 - _TINY):
        return True
    return max(new) <= highest and sum(new) < sum(old) * (1 - _TINY)
