"""What the memory limit of a rank implies for every order: Lemma 28.

A state of a rank is the number of actions done of each chain (a letter on a stage). As microbatches ascend,
the state determines what the rank holds. If memory is tight, few states lie on a path from nothing done to
everything done. What holds in all of these states holds in every order: which actions come before which, and
the least work of the rank before and after an action.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from zbv_solver.kernels.jit import BoolArray, FloatArray, IntArray
from zbv_solver.problem.numeric import MEMORY_TOLERANCE
from zbv_solver.problem.problem import B, F, I, Problem, W

MOST_STATES = 200_000
"""With more states than this nothing is derived: memory then hardly restricts the rank."""

Chain = tuple[int, int]
"""(letter, stage); letter I stands for I or B."""


@dataclass(frozen=True, eq=False)
class Implied:
    """Facts about every order that fits the memory of a rank."""

    chains: list[Chain]
    before: IntArray
    """(chains, m, chains): number of actions of every chain that end before a chain's j-th action starts."""
    head: IntArray
    """(chains, m): the rank's least work before an action starts."""
    tail: IntArray
    """(chains, m): the rank's least work after an action ends."""


@dataclass(frozen=True, eq=False)
class _ChainStep:
    """The next action of a chain; a fused B is a step of its I's chain and of its W's."""

    chain: int
    needs: int | None
    """The chain that must have done more actions; None for the first F."""
    adds: IntArray
    """(chains,) what the action adds to a state."""
    growth: float
    """Memory that it allocates."""


def implied(problem: Problem, rank: int, fusable: list[int]) -> Implied | None:
    """Implications of a rank's limit: Lemma 28. None if microbatches differ or there are too many states.

    Parameters
    ----------
    problem
        With integer costs.
    fusable
        Stages whose backward may be fused; nothing is derived about their W's.
    """
    chains = [(letter, stage) for letter in (F, I, W) for stage in problem.placement.stages_of[rank]]
    # A state is coded as one number in base m + 1.
    if (
        not problem.is_equal
        or problem.memory.limit is None
        or (problem.microbatches + 1) ** len(chains) > 2**62
    ):
        return None
    states = _States(problem, rank, chains, fusable)
    layers = states.reached()
    return states.facts(layers) if layers is not None and len(layers[-1]) else None


class _States:
    """The states of a rank, in layers by the number of actions done."""

    def __init__(self, problem: Problem, rank: int, chains: list[Chain], fusable: list[int]):
        limit, static = float(problem.arrays.limit[rank]), float(problem.arrays.static[rank])
        self.m, self.chains = problem.microbatches, chains
        self.fusable = [stage for stage in fusable if (I, stage) in chains]
        self.duration = problem.arrays.of_equal().duration.astype(np.int64)
        self.delta: FloatArray = problem.arrays.of_equal().delta
        self.change = np.array([self.delta[chain] for chain in chains])
        # Extra room only adds states, and facts that hold in more states also hold in fewer.
        self.room = limit - static + 2 * MEMORY_TOLERANCE * abs(limit)
        self.power = (self.m + 1) ** np.arange(len(chains), dtype=np.int64)
        self.steps = list(self._steps())

    def _steps(self) -> Iterator[_ChainStep]:
        c = len(self.chains) // 3
        for at, (letter, stage) in enumerate(self.chains):
            # Chains are listed as all F's, all I's, all W's; ``at % c`` is the chunk. A backward needs that
            # of the next chunk on this rank; the last chunk needs its F.
            chunk = at % c
            if letter == F:
                needs = at - 1 if chunk else None
            elif letter == I:
                needs = at + 1 if chunk + 1 < c else chunk
            else:
                needs = at - c
            adds = np.zeros(len(self.chains), dtype=np.int64)
            adds[at] = 1
            yield _ChainStep(at, needs, adds, max(0.0, float(self.delta[letter, stage])))
            if letter == I and stage in self.fusable:
                both = adds.copy()
                both[at + c] = 1
                yield _ChainStep(at, needs, both, max(0.0, float(self.delta[B, stage])))

    def _rows(self, keys: IntArray) -> IntArray:
        """States (n, chains) from their codes (n,)."""
        rows: IntArray = keys[:, None] // self.power % (self.m + 1)
        return rows

    def _admits(self, step: _ChainStep, rows: IntArray) -> BoolArray:
        """Whether a step may follow each of the states."""
        fine: BoolArray = rows @ self.change + step.growth <= self.room
        # This also keeps the codes valid: no digit exceeds m, so adding a step never carries.
        fine &= (rows + step.adds <= self.m).all(axis=1)
        if step.needs is not None:
            fine &= rows[:, step.chain] < rows[:, step.needs]
        return fine

    def reached(self) -> list[IntArray] | None:
        """Codes of the states that can be reached, by layer; None if there are too many."""
        parts: list[list[IntArray]] = [[] for _ in range(len(self.chains) * self.m + 1)]
        parts[0].append(np.zeros(1, dtype=np.int64))
        layers: list[IntArray] = []
        # A fused step skips a layer, so ``parts`` collects the codes of later layers until their turn comes.
        for done, found in enumerate(parts):
            keys = np.unique(np.concatenate(found)) if found else np.zeros(0, dtype=np.int64)
            layers.append(keys)
            if sum(map(len, layers)) > MOST_STATES:
                return None
            rows = self._rows(keys)
            for step in self.steps:
                admitted = self._admits(step, rows)
                if admitted.any():
                    parts[done + int(step.adds.sum())].append(keys[admitted] + int(step.adds @ self.power))
        return layers

    def facts(self, layers: list[IntArray]) -> Implied:
        """Go backwards from everything done, and collect what all states before an action have in common."""
        m, n = self.m, len(self.chains)
        # m and the largest integer are neutral for the minima below.
        before = np.full((n, m, n), m, dtype=np.int64)
        head = np.full((n, m), np.iinfo(np.int64).max, dtype=np.int64)
        tail = head.copy()
        for done in range(len(layers) - 2, -1, -1):
            keys = layers[done]
            rows = self._rows(keys)
            is_alive = np.zeros(len(keys), dtype=bool)
            for step in self.steps:
                target = done + int(step.adds.sum())
                if target >= len(layers):
                    continue
                usable = self._admits(step, rows)
                # Later layers are pruned already: this keeps only steps that lead to everything done.
                usable &= np.isin(keys + int(step.adds @ self.power), layers[target])
                is_alive |= usable
                sources, at = rows[usable], step.chain
                if len(sources):
                    # A state's own digit of the chain is the index of the action that comes next there.
                    left = m - sources - step.adds
                    np.minimum.at(before[at], sources[:, at], sources)
                    np.minimum.at(head[at], sources[:, at], self._least_work(sources))
                    np.minimum.at(tail[at], sources[:, at], self._least_work(left))
            layers[done] = keys[is_alive]
        # A fused B completes a W without a step of the W's chain, so the minima of this chain omit orders
        # with a fused B. Nothing is derived about these W's.
        for at, (letter, stage) in enumerate(self.chains):
            if letter == W and stage in self.fusable:
                before[:, :, at] = 0
                before[at], head[at], tail[at] = 0, 0, 0
        return Implied(self.chains, before, head, tail)

    def _least_work(self, rows: IntArray) -> IntArray:
        """Least work of the actions that the rows count, with as many fused backwards as pay."""
        work: IntArray = rows @ np.array([self.duration[chain] for chain in self.chains])
        for stage in self.fusable:
            inputs, weights, fused = self.duration[[I, W, B], stage]
            inputs_done, weights_done = (rows[:, self.chains.index((kind, stage))] for kind in (I, W))
            work = work - max(0, int(inputs + weights - fused)) * np.minimum(inputs_done, weights_done)
        return work
