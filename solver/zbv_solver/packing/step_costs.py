"""What a packing costs: a fast estimate of a replica's step, from the features of its microbatches.

A microbatch of t tokens whose squared lengths sum to q costs a + b t + c q per action. Two sums over a
replica's microbatches then say what its step takes at least (Lemmas 41 and 42 of bounds/PROOFS.md):

- the work of every rank, which is linear in t and q;
- the memory that a microbatch holds, integrated over the time that it must hold it, divided by the rank's
  free memory. It grows faster than its size: twice the tokens hold twice as much for twice as long.

Both are linear in the *moments* 1, t, q, t², t q and q². So the state of a replica is the sum of its
microbatches' moments, and a move changes a few numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil

import numpy as np

from zbv_solver.kernels.jit import FloatArray
from zbv_solver.problem.numeric import FEASIBLE_MEMORY, MEMORY_TOLERANCE, exceeds
from zbv_solver.problem.problem import B, F, I, Problem, W

FEATURES = ("tokens", "tokens_squared")
"""What a packing decides. Costs of a batch depend on nothing else."""
MOMENTS = 6
"""1, t, q, t², t q, q²: products of two linear functions of t and q."""
_PRODUCTS = ((0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2))
_DIGITS = 12
"""Significant digits of the rates: equal packings of costs in another unit compare equally."""


@dataclass(frozen=True, eq=False)
class StepCosts:
    """Costs of a pipeline's actions per feature, on the last axis: fixed, tokens, tokens_squared."""

    duration: FloatArray
    """(4, S, 3) indexed [letter code, stage, feature]."""
    delta: FloatArray
    """(2, S, 3) change of the rank's memory by F and I."""
    latency: FloatArray
    """(S - 1, 3), 0 inside one rank."""
    stages_of: tuple[tuple[int, ...], ...]
    """Stages of every rank in model order."""
    static: FloatArray
    """(p,) memory that a rank always holds."""
    limit: FloatArray
    """(p,) its limit; inf when unlimited."""

    @classmethod
    def of(cls, problem: Problem) -> StepCosts:
        """The coefficients of a problem whose features are at most ``FEATURES``."""
        placement, memory = problem.placement, problem.memory
        named = {feature.name: feature for feature in problem.features}
        costs = [problem.costs, *(named[name].costs if name in named else None for name in FEATURES)]
        deltas = [problem.memory, *(named[name].memory if name in named else None for name in FEATURES)]
        stages = range(placement.n_stages)

        def column(values: Sequence[float] | None, length: int) -> FloatArray:
            return np.zeros(length) if values is None else np.array(values, dtype=np.float64)

        def table(records: Sequence[object], name: str, length: int) -> FloatArray:
            return np.stack([column(getattr(each, name, None), length) for each in records], axis=-1)

        count = len(stages)
        split = [table(costs, name, count) for name in ("forward", "backward_input", "backward_weight")]
        fused = split[I] + split[W] if problem.costs.backward is None else table(costs, "backward", count)
        latency = table(costs, "p2p", count - 1)
        latency[[placement.is_local(boundary) for boundary in range(count - 1)]] = 0.0
        limit = np.array(memory.limit or (np.inf,) * placement.pp_degree, dtype=np.float64)
        return cls(
            np.stack([*split, fused]),
            np.stack([table(deltas, name, count) for name in ("forward", "backward_input")]),
            latency,
            placement.stages_of,
            np.array(memory.static, dtype=np.float64),
            limit,
        )

    @staticmethod
    def moments(lengths: Iterable[int]) -> FloatArray:
        """The moments (6,) of a microbatch with sequences of these lengths."""
        listed = list(lengths)
        t, q = float(sum(listed)), float(sum(length * length for length in listed))
        return np.array([1.0, t, q, t * t, t * q, q * q])

    @cached_property
    def load(self) -> FloatArray:
        """(p, 3): the least work of a rank for a microbatch.

        Where a fused backward may be cheaper, each coefficient is the smaller one, which no microbatch
        undercuts.
        """
        least = self.duration[F] + np.minimum(self.duration[I] + self.duration[W], self.duration[B])
        return np.stack([least[list(stages)].sum(axis=0) for stages in self.stages_of])

    @cached_property
    def path(self) -> FloatArray:
        """(S, 3): the least time from the start of a stage's F to the end of its I or B, of a microbatch."""
        both = self.duration[F] + np.minimum(self.duration[I], self.duration[B])
        both[:-1] += 2 * self.latency
        summed: FloatArray = np.cumsum(both[::-1], axis=0)[::-1]
        return summed

    @cached_property
    def held(self) -> FloatArray:
        """(p, 6): the least memory times time that a microbatch holds on a rank, by moment.

        F's memory is held from the start of F to the end of I or B. After I, what is left is held until W has
        run; after B nothing is.
        """
        forward, inputs = self.delta
        left = np.minimum(forward, forward + inputs)
        left = np.where((left >= 0).all(axis=-1, keepdims=True), left, 0.0)
        longer = np.maximum(0.0, self.duration[B] - self.duration[I])  # 0 where a coefficient is smaller
        rest = np.minimum(_product(left, self.duration[W]), _product(forward, longer))
        return np.stack(
            [(_product(forward, self.path) + rest)[list(stages)].sum(axis=0) for stages in self.stages_of]
        )

    @cached_property
    def rates(self) -> FloatArray:
        """(rows, 6): the step of a replica is at least the largest entry of rates @ (sum of moments).

        Rows that another row exceeds in every moment are left out.
        """
        load = np.zeros((len(self.load), MOMENTS))
        load[:, :3] = self.load
        room = self.limit * (1 + MEMORY_TOLERANCE) - self.static
        limited = np.isfinite(room) & (room > 0)
        area = self.held[limited] / room[limited, None]
        return _largest(_rounded(np.concatenate([load, area])))

    @cached_property
    def needs(self) -> list[tuple[float, float, float, float, float]]:
        """Of a rank: static memory, limit, and a microbatch's forwards (fixed, tokens, tokens_squared)."""
        forward = np.stack([self.delta[0, list(stages)].sum(axis=0) for stages in self.stages_of])
        rows = np.column_stack([self.static, self.limit, forward])
        return [tuple(row) for row in np.unique(rows[np.isfinite(self.limit)], axis=0).tolist()]

    def fits(self, tokens: float, squares: float) -> bool:
        """Whether a microbatch fits into the memory of every rank when it is there alone."""
        return not any(
            exceeds(static + fixed + linear * tokens + square * squares, limit, FEASIBLE_MEMORY)
            for static, limit, fixed, linear, square in self.needs
        )

    @cached_property
    def longest_path(self) -> FloatArray:
        """(6,): rates of the longest path of one microbatch."""
        padded = np.zeros(MOMENTS)
        padded[:3] = _rounded(self.path[0])
        return padded

    def work(self, tokens: float, squares: float) -> float:
        """The work of the busiest rank for a microbatch."""
        return max(fixed + linear * tokens + square * squares for fixed, linear, square in self._load_rows)

    @cached_property
    def _load_rows(self) -> list[list[float]]:
        rows: list[list[float]] = _largest(_rounded(self.load)).tolist()
        return rows

    def step(self, each: FloatArray) -> float:
        """The estimate of a replica's step, from the moments (m, 6) of its microbatches."""
        return max(float((self.rates @ each.sum(axis=0)).max()), float((each @ self.longest_path).max()))


def packing_bound(costs: StepCosts, lengths: Sequence[int], capacity: int, replicas: int) -> float:
    """The step of every packing and plan is at least this: Lemma 42.

    The largest of three: the sums of all sequences, divided by the replicas; the sums of those long sequences
    of which one replica must run several (pigeonhole); and the path of the longest sequence.
    """
    each = np.array([costs.moments([length]) for length in sorted(lengths, reverse=True)])
    total = each.sum(axis=0)
    total[0] = max(replicas, ceil(sum(lengths) / capacity))
    path = float(each[0] @ costs.longest_path)
    sums = np.array([total / replicas, *_several(each, replicas)])
    return max(path, float((sums @ costs.rates.T).max()))


def _several(each: FloatArray, replicas: int) -> Iterator[FloatArray]:
    """Sums of the moments of k + 1 sequences: the shortest of the longest k · replicas + 1, for every k."""
    sums = np.concatenate([np.zeros((1, MOMENTS)), np.cumsum(each, axis=0)])
    for k in range((len(each) - 1) // replicas + 1):
        last = k * replicas + 1
        together = sums[last] - sums[last - k - 1]
        together[0] = 1.0
        yield together


def _largest(rows: FloatArray) -> FloatArray:
    """The rows that no other row reaches in every entry; (n, k) to (fewer, k)."""
    distinct = np.unique(rows, axis=0)
    reached = (distinct[:, None] <= distinct[None]).all(axis=2).sum(axis=1) > 1
    largest: FloatArray = distinct[~reached]
    return largest


def _product(one: FloatArray, other: FloatArray) -> FloatArray:
    """(…, 6): the product of two linear functions (…, 3), by moment."""
    products = np.zeros((*one.shape[:-1], MOMENTS))
    for moment, (i, j) in enumerate(_PRODUCTS):
        products[..., moment] += one[..., i] * other[..., j]
        if i != j:
            products[..., moment] += one[..., j] * other[..., i]
    return products


def _rounded(values: FloatArray) -> FloatArray:
    """The values with ``_DIGITS`` significant digits."""
    with np.errstate(divide="ignore"):
        exponent = np.where(values == 0, 0.0, np.floor(np.log10(np.abs(values))))
    scale = 10.0 ** (_DIGITS - 1 - exponent)
    rounded: FloatArray = np.rint(values * scale) / scale
    return rounded
