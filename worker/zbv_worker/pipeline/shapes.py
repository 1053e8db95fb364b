"""Agreement on the shapes of batches, which may differ between microbatches and between steps.

A channel's receives are posted before their tensors are sent, so both ends must know the shapes of all
microbatches' data, or know that they do not (:mod:`zbv_worker.transport.endpoints`). If every rank of a
pipeline is given the batch, every rank sees the shapes; the ranks then make sure of that, once for each new
combination. With a data rank, that rank tells the others (:mod:`zbv_worker.pipeline.data`). If some ranks are
given only what their layers need, the first call decides: either all microbatches of all steps have equal
shapes, or every activation has a header.

The first call also finds ranks that lack a keyword, which their layers would silently do without.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_flatten

from zbv_worker.errors import InvalidRun
from zbv_worker.pipeline.calls import Calls, digest, require_same_rows
from zbv_worker.stage.layers import Keywords
from zbv_worker.transport.connected import ConnectedTransport

Call = Literal["step", "evaluate"]
Shapes = tuple[int, ...]
"""By microbatch, numbers that stand for the shapes of its data."""

_MOST_KNOWN = 4096
"""Combinations of shapes that are remembered."""


class Given(NamedTuple):
    """What a rank was given in a call: the names of keywords, the shapes, and the rows if known."""

    keywords: list[str]
    shapes: Shapes
    rows: int = 0

    @classmethod
    def of(
        cls,
        microbatches: Sequence[tuple[Any, ...]],
        keywords: Collection[str],
        *,
        equal: bool,
        rows: int = 0,
    ) -> Given:
        """Describe microbatches: any nested containers of tensors.

        Parameters
        ----------
        equal
            Whether they are known to have equal shapes.
        """
        if equal:
            return cls(sorted(keywords), (_number_of(microbatches[0]),) * len(microbatches), rows)
        return cls(sorted(keywords), tuple(map(_number_of, microbatches)), rows)

    @property
    def are_equal(self) -> bool:
        """Whether all microbatches have equal shapes."""
        return len(set(self.shapes)) == 1

    @property
    def combination(self) -> int:
        """A number that stands for all shapes."""
        return self.shapes[0] if self.are_equal else digest(self.shapes)


def _number_of(microbatch: tuple[Any, ...]) -> int:
    leaves, structure = tree_flatten(microbatch)
    shapes = [(*x.shape, str(x.dtype)) if isinstance(x, Tensor) else type(x).__name__ for x in leaves]
    return digest((structure, shapes))


class AgreedShapes:
    """The shapes on which the ranks of one pipeline agree.

    Parameters
    ----------
    keywords_by_rank
        Those that the layers of each rank take.
    calls
        Compare new shapes with those of the neighbours.
    startup_timeout
        Seconds to wait for all ranks in the first call of each kind.
    may_differ
        Whether the plan says that microbatches differ.
    """

    def __init__(
        self,
        transport: ConnectedTransport,
        calls: Calls,
        keywords_by_rank: Sequence[Keywords],
        startup_timeout: float,
        *,
        may_differ: bool = False,
    ):
        self._transport = transport
        self._calls = calls
        layout = transport.layout
        self._column = [layout.global_rank(at, transport.column) for at in range(layout.pp_degree)]
        self._takes = keywords_by_rank
        self._startup_timeout = startup_timeout
        self._may_differ = may_differ
        self._known: dict[Call, set[int]] = {}
        self._rule: dict[Call, Literal["seen", "equal", "unknown"]] = {}

    def announced(self, call: Call, given: Given) -> int:
        """What neighbours must have too: all shapes, if the ranks see them, else 0."""
        return given.combination + 1 if self._rule.get(call) == "seen" else 0

    def agree(self, call: Call, given: Given) -> Shapes | None:
        """Return the shapes of a call's microbatches; None if the ranks cannot know them.

        Collective in the first call of each kind, and over the pipeline if the shapes are new.

        Raises
        ------
        InvalidRun
            If a rank lacks a keyword that its layers take.
        Disagreement
            If the ranks of the pipeline have different batches, or do not make the same call.
        TimeoutError, ConnectionError
            If a rank does not take part.
        """
        known, combination = self._known.get(call), given.combination
        if known is None:
            self._known[call] = {combination}
            self._rule[call] = self._agree_first(call, given)
        elif self._rule[call] == "seen" and combination not in known:
            self._calls.meet_all()
            if len(known) == _MOST_KNOWN:
                known.clear()
            known.add(combination)
        elif self._rule[call] == "equal" and combination not in known:
            raise InvalidRun(
                f"found a batch of other shapes than in the first {call}. They may change if all ranks or "
                f"only the data_rank are given the whole batch."
            )
        if self._rule[call] == "equal":
            return (0,) * len(given.shapes)
        return given.shapes if self._rule[call] == "seen" else None

    def _agree_first(self, call: Call, given: Given) -> Literal["seen", "equal", "unknown"]:
        """Who knows the shapes: all ranks of the pipeline, because they were given the same, or none."""
        self._calls.meet_all()
        said = self._transport.gather(
            [given.keywords, given.combination, given.are_equal, given.rows], self._startup_timeout
        )
        require_same_rows({rank: said[rank][3] for rank in self._column})
        self._require_keywords({rank: said[rank][0] for rank in self._column})
        if len({said[rank][1] for rank in self._column}) == 1:
            return "seen"
        all_equal = all(said[rank][2] for rank in self._column)
        return "equal" if all_equal and not self._may_differ else "unknown"

    def _require_keywords(self, given: Mapping[int, Sequence[str]]) -> None:
        names = {name: rank for rank, own in reversed([*given.items()]) for name in own}
        for rank, own in given.items():
            takes = self._takes[rank]
            lacking = [n for n in names if n not in own and (takes.takes_any or n in takes.names)]
            if lacking:
                raise InvalidRun(
                    f"rank {rank} was not given the keyword {lacking[0]!r}, which its layers take and rank "
                    f"{names[lacking[0]]} was given. Pass it on every rank, or pass data_rank= to Pipeline "
                    f"and the batch on that rank only."
                )
