"""Agreement on the shapes of batches, so that they may change from one step to the next.

A channel's receives are posted before their tensors are sent, so both ends must know the shapes. They are
exchanged when a boundary is first used, and must be exchanged again when a batch has others. If every rank
of a pipeline is given the batch, every rank sees the change; the ranks then make sure of that, once for each
new combination of shapes. If some ranks are given nothing, shapes cannot change, except with a data rank,
which tells the others (:mod:`zbv_worker.pipeline.data`).

The first call also finds ranks that lack a keyword, which their layers would silently do without.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_flatten

from zbv_worker.errors import Disagreement, InvalidRun
from zbv_worker.stage.layers import Keywords
from zbv_worker.transport.control import ConnectedTransport

Call = Literal["step", "evaluate"]


class Given(NamedTuple):
    """What a rank was given in a call: the names of keywords, and a number that stands for all shapes."""

    keywords: list[str]
    shapes: int

    @classmethod
    def of(cls, microbatch: tuple[Any, ...], keywords: Collection[str]) -> Given:
        """Describe a microbatch: any nested containers of tensors."""
        leaves, structure = tree_flatten(microbatch)
        shapes = [(*x.shape, str(x.dtype)) if isinstance(x, Tensor) else type(x).__name__ for x in leaves]
        digest = hashlib.sha256(repr((structure, shapes)).encode()).digest()
        return cls(sorted(keywords), int.from_bytes(digest[:6]))


class AgreedShapes:
    """The shapes on which the ranks of one pipeline agree.

    Parameters
    ----------
    keywords_by_rank
        Those that the layers of each rank take.
    timeout, startup_timeout
        Seconds to wait for another rank, and for all of them in the first call.
    """

    def __init__(
        self,
        transport: ConnectedTransport,
        keywords_by_rank: Sequence[Keywords],
        timeout: float,
        startup_timeout: float,
    ):
        self._transport = transport
        self._control = transport.control
        layout = transport.layout
        self._column = [layout.global_rank(at, transport.column) for at in range(layout.pp_degree)]
        self._takes = keywords_by_rank
        self._timeout, self._startup_timeout = timeout, startup_timeout
        self._known: dict[Call, set[int]] = {}
        self._changing: dict[Call, bool] = {}

    def agree(self, call: Call, given: Given) -> int:
        """Return the number that stands for the shapes of a call's batch; 0 if shapes cannot change.

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
        known = self._known.get(call)
        if known is None:
            self._known[call] = {given.shapes}
            self._changing[call] = self._agree_first(call, given)
        elif self._changing[call] and given.shapes not in known:
            self._agree_again(given.shapes)
            known.add(given.shapes)
        return given.shapes if self._changing[call] else 0

    def _agree_first(self, call: Call, given: Given) -> bool:
        """Whether all ranks of the pipeline were given the same."""
        said = self._transport.gather([call, *given], self._startup_timeout)
        for rank, (other, _, _) in enumerate(said):
            if other != said[0][0]:
                raise Disagreement(
                    f"rank 0 called {said[0][0]} and rank {rank} called {other}. All ranks must make the "
                    f"same calls in the same order."
                )
        mine = {rank: Given(*said[rank][1:]) for rank in self._column}
        self._require_keywords(mine)
        return len({each.shapes for each in mine.values()}) == 1

    def _require_keywords(self, given: Mapping[int, Given]) -> None:
        names = {name: rank for rank, each in reversed([*given.items()]) for name in each.keywords}
        for rank, each in given.items():
            takes = self._takes[rank]
            lacking = [n for n in names if n not in each.keywords and (takes.takes_any or n in takes.names)]
            if lacking:
                raise InvalidRun(
                    f"rank {rank} was not given the keyword {lacking[0]!r}, which its layers take and rank "
                    f"{names[lacking[0]]} was given. Pass it on every rank, or pass data_rank= to Pipeline "
                    f"and the batch on that rank only."
                )

    def _agree_again(self, shapes: int) -> None:
        """Compare new shapes with those of the pipeline's other ranks."""
        first, *others = self._column
        if self._transport.rank == first:
            found = {rank: self._control.hear(rank, self._timeout) for rank in others}
            for rank in others:
                self._control.tell(rank, shapes, self._timeout)
            wrong = [rank for rank, other in found.items() if other != shapes]
        else:
            self._control.tell(first, shapes, self._timeout)
            wrong = [first] if self._control.hear(first, self._timeout) != shapes else []
        if wrong:
            raise Disagreement(
                f"the batches of ranks {self._transport.rank} and {wrong[0]} have different shapes. Load the "
                f"same batches on all ranks of a pipeline, in the same order."
            )
