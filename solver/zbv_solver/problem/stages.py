"""The stages of a pipeline: which rank hosts them, what they cost, what depends on the microbatch, and all of
that as arrays.

``v``       two stages per rank: stage s is on rank s on the way down and on rank 2p-1-s on the way back.
``loop``    c stages per rank: stage s is on rank s mod p (the placement of interleaved 1F1B).
``single``  one stage per rank.

Microbatches with equal features cost the same: they are of one *kind*. Where all microbatches are equal there
is one kind, and the arrays are as small as the problem's document.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from zbv_solver.kernels.jit import FloatArray, IntArray
from zbv_solver.problem.numeric import ROUNDING, clean_deltas

PlacementKind = Literal["v", "loop", "single"]
PLACEMENT_KINDS: tuple[str, ...] = get_args(PlacementKind)
COMMUNICATION = "costs/communication"
"""The section of a document that makes pairs possible."""
FIXED = "fixed"
"""The name, in a document, of the part of a cost that does not depend on the microbatch."""
MAX_FEATURES = 16
MAX_FEATURE_NAME = 64


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
class Communication:
    """How much of an action the other action of a *pair* can hide, one per stage (S,), at most its duration.

    A pair is an F that runs together with an I or B of its rank, so that each hides the communication of the
    other (the all-to-all of a mixture of experts) behind its own computation. It takes ``pair_factor`` times
    the largest of: F, I, both without their communication, and both communications.
    """

    forward: PerStage
    backward_input: PerStage
    backward: PerStage


@dataclass(frozen=True)
class Copies:
    """What F's keep may be copied to the host and back, one value per stage (S,).

    The memory of the device is free from the end of the copy out until the copy in begins. Every rank has one
    engine per direction, which runs one copy at a time (docs/formats.md, "Copies to the host").
    """

    offload: PerStage
    reload: PerStage
    """Time of the copy to the host, and back."""
    offloadable: PerStage
    """How much memory moves, at most that of the F."""
    host_limit: tuple[float, ...] | None = None
    """Per rank (p,), of all copies that the host holds at once; None if unlimited."""


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
    communication: Communication | None = None
    """The coefficients per stage or boundary. ``costs.backward`` is None if and only if the problem's is, and
    so is ``communication``."""

    @property
    def coefficients(self) -> dict[tuple[str, str], PerStage]:
        """All coefficients, by section of the document and name."""
        return {
            (section, field.name): values
            for section, record in (
                ("costs", self.costs),
                ("memory", self.memory),
                (COMMUNICATION, self.communication),
            )
            if record is not None
            for field in fields(record)
            if (values := getattr(record, field.name)) is not None
        }


@dataclass(frozen=True, eq=False)
class ProblemArrays:
    """A problem's numbers for kernels (read-only): m microbatches of K kinds."""

    duration: FloatArray
    """(4, S, K) float64, indexed [letter code, stage, kind]."""
    delta: FloatArray
    """(4, S, K) float64, change of the rank's memory at an action. F + I + W and F + B are exactly 0."""
    latency: FloatArray
    """(S-1, K) float64, latency of a boundary; 0 inside one rank."""
    kind_of: NDArray[np.int32]
    """(m,) int32, the kind of every microbatch."""
    rank_of: NDArray[np.int32]
    """(S,) int32."""
    static: FloatArray
    limit: FloatArray
    """(p,) float64; the limit is inf when unlimited."""
    communication: FloatArray | None = None
    """(4, S, K) float64, like the durations, what a pair can hide of them; None if there are no pairs."""

    def __post_init__(self) -> None:
        for array in vars(self).values():
            if array is not None:
                array.flags.writeable = False

    @classmethod
    def of(
        cls,
        placement: Placement,
        microbatches: int,
        costs: Costs,
        memory: Memory,
        features: Sequence[Feature],
        communication: Communication | None = None,
    ) -> ProblemArrays:
        """The arrays of a problem whose numbers have been checked."""
        kinds = Kinds.of(microbatches, features)
        tables = kinds.tables("costs", costs)
        inputs, weights, latency = (tables[name] for name in ("backward_input", "backward_weight", "p2p"))
        held, by_inputs = (kinds.tables("memory", memory)[name] for name in ("forward", "backward_input"))
        cleaned, by_weights = clean_deltas(held, by_inputs)
        local = [placement.is_local(boundary) for boundary in range(placement.n_stages - 1)]
        latency[np.array(local, dtype=np.bool_)] = 0.0
        unlimited = (math.inf,) * placement.pp_degree
        return cls(
            duration=np.stack([tables["forward"], inputs, weights, tables.get("backward", inputs + weights)]),
            delta=np.stack([held, cleaned, by_weights, 0.0 - held]),
            latency=latency,
            kind_of=kinds.kind_of,
            rank_of=np.array(placement.rank_of, dtype=np.int32),
            static=np.array(memory.static, dtype=np.float64),
            limit=np.array(memory.limit or unlimited, dtype=np.float64),
            communication=None if communication is None else _hidden(kinds, communication),
        )

    @property
    def kinds(self) -> int:
        """Number of kinds K."""
        return int(self.duration.shape[2])

    @property
    def count(self) -> IntArray:
        """Number of microbatches of every kind, (K,)."""
        counts: IntArray = np.bincount(self.kind_of, minlength=self.kinds)
        return counts

    def durations(self, stage: IntArray, letter: IntArray, microbatch: IntArray) -> FloatArray:
        """The duration of every action, (n,)."""
        found: FloatArray = self.duration[letter, stage, self.kind_of[microbatch]]
        return found

    def hidden(self, stage: IntArray, letter: IntArray, microbatch: IntArray) -> FloatArray:
        """What a pair can hide of every action, (n,)."""
        if self.communication is None:
            return np.zeros(len(stage))
        found: FloatArray = self.communication[letter, stage, self.kind_of[microbatch]]
        return found

    def deltas(self, stage: IntArray, letter: IntArray, microbatch: IntArray) -> FloatArray:
        """The change of memory at every action, (n,)."""
        found: FloatArray = self.delta[letter, stage, self.kind_of[microbatch]]
        return found

    def of_equal(self) -> EqualCosts:
        """The costs of microbatches that are all equal.

        Raises :class:`ValueError` when they are not; the caller would use the costs of one of them for all.
        """
        if self.kinds != 1:
            raise ValueError(f"found {self.kinds} kinds of microbatches; this method needs equal ones.")
        return EqualCosts(
            *(np.ascontiguousarray(table[..., 0]) for table in (self.duration, self.delta, self.latency))
        )

    def average(self) -> ProblemArrays:
        """The arrays with every microbatch replaced by the average one."""
        share = self.count / len(self.kind_of)

        def mean(table: FloatArray) -> FloatArray:
            averaged: FloatArray = (table @ share)[..., None]
            return averaged

        delta = mean(self.delta)
        delta[2], delta[3] = -(delta[0] + delta[1]), -delta[0]
        return replace(
            self,
            duration=mean(self.duration),
            communication=None if self.communication is None else mean(self.communication),
            delta=delta,
            latency=mean(self.latency),
            kind_of=np.zeros_like(self.kind_of),
        )


def _hidden(kinds: Kinds, communication: Communication) -> FloatArray:
    """(4, S, K): what a pair can hide of every action; nothing of W, which is in no pair."""
    tables = kinds.tables(COMMUNICATION, communication)
    forward, inputs, fused = (tables[name] for name in ("forward", "backward_input", "backward"))
    return np.stack([forward, inputs, np.zeros_like(inputs), fused])


def pair_duration(
    forward: FloatArray, backward: FloatArray, hidden: tuple[FloatArray, FloatArray], factor: float
) -> FloatArray:
    """How long pairs take, from the durations of their actions and what of each the other can hide."""
    mine, others = hidden
    apart = (forward - mine) + (backward - others)
    longest: FloatArray = np.maximum(np.maximum(forward, backward), np.maximum(apart, mine + others))
    return factor * longest


class EqualCosts(NamedTuple):
    """Costs of a microbatch if all are equal: (4, S), (4, S) and (S-1,), as in :class:`ProblemArrays`."""

    duration: FloatArray
    delta: FloatArray
    latency: FloatArray


@dataclass(frozen=True, eq=False)
class Kinds:
    """Which microbatches are equal."""

    kind_of: NDArray[np.int32]
    """(m,) int32."""
    value: FloatArray
    """(features, K) the features of every kind."""
    features: Sequence[Feature]

    @classmethod
    def of(cls, microbatches: int, features: Sequence[Feature]) -> Kinds:
        """The kinds of microbatches. Features that nothing depends on do not count."""
        values = np.array([each.value for each in features]).reshape(len(features), microbatches)
        matters = [any(any(row) for row in each.coefficients.values()) for each in features]
        if not any(matters):
            return cls(np.zeros(microbatches, np.int32), values[:, :1], features)
        _, first, inverse = np.unique(values[matters], axis=1, return_index=True, return_inverse=True)
        return cls(inverse.reshape(-1).astype(np.int32), values[:, first], features)

    def tables(self, section: str, fixed: Costs | Deltas | Communication) -> dict[str, FloatArray]:
        """fixed + Σ coefficient · feature, as (length, K), by name; sums that are 0 up to rounding are 0."""
        coefficients = [each.coefficients for each in self.features]
        tables = {}
        for name, values in vars(fixed).items():
            if values is None or name in ("static", "limit"):
                continue
            own = np.array(values, dtype=np.float64)[:, None]
            tables[name] = own.copy()
            if coefficients:
                rows = np.array([each[section, name] for each in coefficients], dtype=np.float64)
                rows = rows.reshape(len(coefficients), len(values)).T
                table = own + rows @ self.value
                terms = np.abs(own) + np.abs(rows) @ np.abs(self.value)
                tables[name] = np.where(np.abs(table) <= ROUNDING * terms, 0.0, table)
        return tables

    def microbatch(self, kind: int) -> int:
        """The first microbatch of a kind."""
        return int(np.argmax(self.kind_of == kind))
