"""What crosses the boundaries between stages: how a rank knows the structure of each microbatch's tensors.

Both ends of a boundary must know the structure before the receive is posted. There are three ways:

- The model states it (:class:`zbv_worker.model.protocol.Shaped`): nothing is exchanged.
- Microbatches have *shapes*, numbers that are equal if their data have equal shapes. The first activation of
  a boundary with new shapes has a header (:mod:`zbv_worker.transport.headers`); later ones have none, nor
  have those of later steps. If all microbatches are equal, there is one number, and one header per boundary.
- Nothing is known: every activation has a header.

A gradient has the structure of its activation, which its receiver has sent.
"""

from __future__ import annotations

from collections.abc import Sequence

from zbv_worker.values.packing import Crossing
from zbv_worker.values.structure import Structure

_MOST_SHAPES = 1024
"""Remembered per rank. Both ends forget the others at the same step, because they expect the same."""
_FEW_SHAPES = 16
"""So many different shapes count as new; a batch may have other shapes in every step."""


class Crossings:
    """What crosses the boundaries of a rank, as far as it is known; shared by its inboxes and outboxes.

    Parameters
    ----------
    microbatches
        Their number. They are equal unless :meth:`expect` is called.
    stated
        The structures that the model states, by microbatch, for every boundary; empty if it states none.
    """

    def __init__(self, microbatches: int, stated: Sequence[Structure] = ()):
        different = {structure: Crossing(structure) for structure in stated}
        self._stated = [different[structure] for structure in stated]
        self._equal = (0,) * microbatches
        self._shapes: tuple[int, ...] | None = self._equal
        self._remembered = {0}
        self._known: dict[tuple[int, int], Crossing] = {}
        self._first: dict[int, Structure] = {}

    @property
    def is_stated(self) -> bool:
        """Whether the model states all structures."""
        return bool(self._stated)

    @property
    def are_equal(self) -> bool:
        """Whether the microbatches of all steps must be equal."""
        return self._shapes == self._equal

    def expect(self, shapes: Sequence[int] | None) -> bool:
        """Call between steps if microbatches may have other shapes from now on; alike on all ranks.

        Returns whether one of the first few shapes is new.

        Parameters
        ----------
        shapes
            By microbatch, numbers that stand for the shapes of its data, all 0 if all microbatches of all
            steps are equal; None if they are not known.
        """
        self._shapes = None if shapes is None else tuple(shapes)
        expected = set(shapes or ())
        is_new = len(self._remembered) < _FEW_SHAPES and not expected <= self._remembered
        self._remembered |= expected
        if len(self._remembered) > _MOST_SHAPES:
            self._remembered = expected
            self._known = {key: known for key, known in self._known.items() if key[1] in expected}
        return is_new

    def begin(self) -> None:
        """Begin a step."""
        if self._shapes is None:
            self._known.clear()

    def of(self, boundary: int, microbatch: int) -> Crossing | None:
        """What crosses a boundary for a microbatch; None if it is not known yet."""
        if self._stated:
            return self._stated[microbatch]
        return self._known.get((boundary, microbatch if self._shapes is None else self._shapes[microbatch]))

    def add(self, boundary: int, microbatch: int, structure: Structure) -> Crossing:
        """Remember the structure of an activation, which its header has told."""
        made = Crossing(structure)
        self._known[boundary, microbatch if self._shapes is None else self._shapes[microbatch]] = made
        self._first.setdefault(boundary, structure)
        return made

    def first(self, boundary: int) -> Structure | None:
        """The structure of a boundary's first header, to which later headers refer; None before."""
        return self._first.get(boundary)

    def largest(self, boundaries: Sequence[int] = ()) -> dict[int, Structure]:
        """The largest structure of every boundary, as far as it is known.

        Parameters
        ----------
        boundaries
            Those of the rank, for structures that the model states.
        """
        stated = boundaries if self._stated else ()
        found: dict[int, list[Crossing]] = {boundary: [*self._stated] for boundary in stated}
        for (boundary, _), crossing in self._known.items():
            found.setdefault(boundary, []).append(crossing)
        return {
            boundary: max(each, key=lambda crossing: crossing.spec("activation").nbytes).structure
            for boundary, each in sorted(found.items())
        }
