"""The stages of a pipeline: which rank hosts them, what they cost, and what depends on the microbatch.

``v``       two stages per rank: stage s is on rank s on the way down and on rank 2p-1-s on the way back.
``loop``    c stages per rank: stage s is on rank s mod p (the placement of interleaved 1F1B).
``single``  one stage per rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
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


PerStage = tuple[float, ...]


@dataclass(frozen=True)
class Costs:
    """Durations, one per stage (S,), in the caller's unit."""

    forward: PerStage
    backward_input: PerStage
    backward_weight: PerStage
    p2p: PerStage
    """Transfer latency per stage boundary (S-1,); ignored where the boundary lies inside one rank."""
    backward: PerStage | None = None
    """The fused backward B; None means that it costs I + W."""

    def fused(self, stage: int) -> float:
        """Duration of the fused backward of a stage."""
        if self.backward is not None:
            return self.backward[stage]
        return self.backward_input[stage] + self.backward_weight[stage]

    def mapped(self, of_stages: Callable[[PerStage], PerStage], p2p: PerStage | None = None) -> Costs:
        """Costs with every duration changed by a function, and other latencies if they are given."""
        return Costs(
            of_stages(self.forward),
            of_stages(self.backward_input),
            of_stages(self.backward_weight),
            self.p2p if p2p is None else p2p,
            None if self.backward is None else of_stages(self.backward),
        )


@dataclass(frozen=True)
class Deltas:
    """Changes of a rank's memory at F, I and W, one per stage (S,); their sum is 0 per stage, up to rounding.

    These are the numbers that the user stated, and they are part of a plan's identity. Sums over microbatches
    must use :attr:`ProblemArrays.delta` instead, whose deltas sum to exactly 0.
    """

    forward: PerStage
    backward_input: PerStage
    backward_weight: PerStage


@dataclass(frozen=True)
class Memory(Deltas):
    """Memory deltas per stage; static use and limit per rank (p,). ``limit`` is None when unlimited."""

    static: tuple[float, ...]
    limit: tuple[float, ...] | None = None

    @classmethod
    def unlimited(cls, placement: Placement) -> Memory:
        """All deltas 0 and no limit."""
        zeros = (0.0,) * placement.n_stages
        return cls(zeros, zeros, zeros, (0.0,) * placement.pp_degree)


@dataclass(frozen=True)
class Feature:
    """A number that differs between microbatches, such as their tokens, and what depends on it.

    The cost of microbatch j is the problem's own number plus, for every feature, coefficient times value[j].
    """

    name: str
    value: tuple[float, ...]
    """(m,) not negative."""
    costs: Costs
    memory: Deltas
    """The coefficients per stage or boundary. ``costs.backward`` is None if and only if the problem's is."""

    @property
    def coefficients(self) -> dict[tuple[str, str], PerStage]:
        """All coefficients, by section of the document and name."""
        return {
            (section, field.name): values
            for section, record in (("costs", self.costs), ("memory", self.memory))
            for field in fields(record)
            if (values := getattr(record, field.name)) is not None
        }
