"""A problem as arrays: what every action costs, by kind of microbatch.

Microbatches with equal features cost the same: they are of one *kind*. Where all microbatches are equal there
is one kind, and the arrays are as small as the problem's document.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zbv_solver.kernels.arrays import FloatArray, IntArray
from zbv_solver.problem.numeric import ROUNDING, clean_deltas
from zbv_solver.problem.stages import Costs, Deltas, Feature, Memory, PerStage, Placement


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

    def __post_init__(self) -> None:
        for array in vars(self).values():
            array.flags.writeable = False

    @classmethod
    def of(
        cls,
        placement: Placement,
        microbatches: int,
        costs: Costs,
        memory: Memory,
        features: Sequence[Feature],
    ) -> ProblemArrays:
        """The arrays of a problem whose numbers have been checked."""
        kinds = Kinds.of(microbatches, features)
        forward, inputs, weights = (
            kinds.table(getattr(costs, name), [getattr(each.costs, name) for each in features])
            for name in ("forward", "backward_input", "backward_weight")
        )
        fused = inputs + weights
        if costs.backward is not None:
            fused = kinds.table(costs.backward, [each.costs.backward or () for each in features])
        latency = kinds.table(costs.p2p, [each.costs.p2p for each in features])
        local = [placement.is_local(boundary) for boundary in range(placement.n_stages - 1)]
        latency[np.array(local, dtype=np.bool_)] = 0.0
        unlimited = (math.inf,) * placement.pp_degree
        return cls(
            duration=np.stack([forward, inputs, weights, fused]),
            delta=_clean(kinds, memory, features),
            latency=latency,
            kind_of=kinds.kind_of,
            rank_of=np.array(placement.rank_of, dtype=np.int32),
            static=np.array(memory.static, dtype=np.float64),
            limit=np.array(memory.limit or unlimited, dtype=np.float64),
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
            delta=delta,
            latency=mean(self.latency),
            kind_of=np.zeros_like(self.kind_of),
        )


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

    @classmethod
    def of(cls, microbatches: int, features: Sequence[Feature]) -> Kinds:
        """The kinds of microbatches. Features that nothing depends on do not count."""
        values = np.array([each.value for each in features]).reshape(len(features), microbatches)
        matters = [any(any(row) for row in each.coefficients.values()) for each in features]
        if not any(matters):
            return cls(np.zeros(microbatches, np.int32), values[:, :1])
        _, first, inverse = np.unique(values[matters], axis=1, return_index=True, return_inverse=True)
        return cls(inverse.reshape(-1).astype(np.int32), values[:, first])

    def table(self, fixed: PerStage, coefficients: Sequence[PerStage]) -> FloatArray:
        """fixed + Σ coefficient · feature, as (length, K); sums that are 0 up to rounding are 0."""
        own = np.array(fixed, dtype=np.float64)[:, None]
        if not coefficients:
            return own.copy()
        rows = np.array(coefficients, dtype=np.float64).reshape(len(coefficients), len(fixed)).T
        table: FloatArray = own + rows @ self.value
        terms = np.abs(own) + np.abs(rows) @ np.abs(self.value)
        return np.where(np.abs(table) <= ROUNDING * terms, 0.0, table)

    def microbatch(self, kind: int) -> int:
        """The first microbatch of a kind."""
        return int(np.argmax(self.kind_of == kind))


def _clean(kinds: Kinds, memory: Deltas, features: Sequence[Feature]) -> FloatArray:
    """The deltas (4, S, K); those of F, I and W, and of F and B, sum to exactly 0."""
    forward, inputs = (
        kinds.table(getattr(memory, name), [getattr(each.memory, name) for each in features])
        for name in ("forward", "backward_input")
    )
    cleaned, weights = clean_deltas(forward, inputs)
    return np.stack([forward, cleaned, weights, 0.0 - forward])
