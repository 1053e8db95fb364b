"""The names under which checkpoints store tied parameters: only the first copy of each is stored.

Whether tied parameters have copies depends on the placement, so a checkpoint may lack a name that a run with
another placement has, or the other way round. Any name of a set of tied parameters stands for all of them.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping

from torch import Tensor

from zbv_worker.gradients.ties import Ties

_PREFIXES = ("model.", "optimizer.state.", "optimizer.param_groups.")


class TiedNames:
    """The names of the tied parameters of a run.

    Parameters
    ----------
    ties
        None if the model has none.
    """

    def __init__(self, ties: Ties | None):
        self._sets = [] if ties is None else ties.names
        self._further = set() if ties is None else ties.further_names

    def is_further(self, name: str) -> bool:
        """Whether an entry of a checkpoint belongs to a further copy on this rank, and must not be saved."""
        found = self._parameter(name)
        return found is not None and found[1] in self._further

    def aliases(self, name: str) -> tuple[str, ...]:
        """All names of a parameter, the first one first."""
        return next((tuple(some) for some in self._sets if name in some), (name,))

    def stored(self, name: str, known: Container[str]) -> str:
        """The name of an entry in a checkpoint that has the ``known`` names; its own if there is none."""
        found = None if name in known else self._parameter(name)
        if found is None:
            return name
        prefix, own, rest = found
        names = next(some for some in self._sets if own in some)
        return next((there for other in names if (there := f"{prefix}{other}{rest}") in known), name)

    def by_stored(self, tensors: Mapping[str, Tensor], known: Container[str]) -> Iterator[dict[str, Tensor]]:
        """The tensors by their names in a checkpoint, in as many parts as copies have one name there."""
        left = dict(tensors)
        while left:
            some: dict[str, Tensor] = {}
            for name in list(left):
                there = self.stored(name, known)
                if there not in some:
                    some[there] = left.pop(name)
            yield some

    def _parameter(self, name: str) -> tuple[str, str, str] | None:
        """Split the name of an entry around the name of a tied parameter; None if it is of another one."""
        for prefix in _PREFIXES:
            for some in self._sets:
                for own in some:
                    if name == f"{prefix}{own}" or name.startswith(f"{prefix}{own}."):
                        return prefix, own, name.removeprefix(f"{prefix}{own}")
        return None
