"""Which rank hosts which stages.

``v``       two stages per rank: stage s is on rank s on the way down and on rank 2p-1-s on the way back.
``loop``    c stages per rank: stage s is on rank s mod p (the placement of interleaved 1F1B).
``single``  one stage per rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

PlacementKind = Literal["v", "loop", "single"]
PLACEMENT_KINDS: tuple[str, ...] = get_args(PlacementKind)


@dataclass(frozen=True)
class Placement:
    """A placement of ``n_stages = pp_degree * chunks`` stages, numbered in model order.

    A *chunk* is a stage as seen from its rank: chunk k of rank r is the k-th stage in model order there.
    """

    kind: PlacementKind
    pp_degree: int
    chunks: int

    @classmethod
    def of(cls, kind: PlacementKind, pp_degree: int, chunks: int | None = None) -> Placement:
        """The placement of a kind with its usual number of chunks (``v`` and ``loop``: 2, ``single``: 1)."""
        return cls(kind, pp_degree, chunks if chunks is not None else 1 if kind == "single" else 2)

    @property
    def name(self) -> str:
        """The kind, with the number of chunks of a loop: ``v``, ``loop-3``, ``single``."""
        return self.kind if self.kind != "loop" else f"loop-{self.chunks}"

    @property
    def n_stages(self) -> int:
        """Number of stages S."""
        return self.pp_degree * self.chunks

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """Rank of every stage, shape (S,)."""
        p = self.pp_degree
        if self.kind == "v":
            return tuple(s if s < p else 2 * p - 1 - s for s in range(2 * p))
        return tuple(s % p for s in range(self.n_stages))

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """Stages of every rank in model order, so indexed [rank][chunk]; shape (p, chunks)."""
        hosted: list[list[int]] = [[] for _ in range(self.pp_degree)]
        for stage, rank in enumerate(self.rank_of):
            hosted[rank].append(stage)
        return tuple(tuple(stages) for stages in hosted)

    @cached_property
    def chunk_of(self) -> tuple[int, ...]:
        """Chunk index of every stage, shape (S,)."""
        return tuple(stage // self.pp_degree for stage in range(self.n_stages))

    def is_local(self, boundary: int) -> bool:
        """Whether the boundary between stages ``boundary`` and ``boundary + 1`` lies inside one rank."""
        return self.rank_of[boundary] == self.rank_of[boundary + 1]
