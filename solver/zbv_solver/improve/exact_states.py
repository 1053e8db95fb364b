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

from zbv_solver.kernels.arrays import BoolArray, FloatArray, IntArray
from zbv_solver.problem.numeric import MEMORY_TOLERANCE
from zbv_solver.problem.problem import B, F, I, Problem, W

MOST_STATES = 200_000
"""With more states than this nothing is derived: memory then hardly restricts the rank."""

Chain = tuple[int, int]
"""(letter, stage); letter I stands for I or B."""


@dataclass(frozen=True, eq=False)
class Implied:
    """Facts about every order that fits the memory of a rank.

    Attributes
    ----------
    chains
        The rank's chains.
    before
        (chains, m, chains): number of actions of every chain that end before a chain's j-th action starts.
    head, tail
        (chains, m): the rank's least work before an action starts, and after it ends.
    """

    chains: list[Chain]
    before: IntArray
    head: IntArray
    tail: IntArray


@dataclass(frozen=True, eq=False)
class _ActionKind:
    """One kind of action.

    Attributes
    ----------
    step
        (chains,) what it adds to a state.
    needs
        Pairs of chains: the first must have done fewer actions than the second.
    growth
        Memory that it allocates.
    counted
        Chains whose facts it decides.
    """

    step: IntArray
    needs: list[tuple[int, int]]
    growth: float
    counted: list[int]


def implied(problem: Problem, rank: int, fusable: list[int]) -> Implied | None:
    """Implications of a rank's limit, or None if there are too many states: Lemma 28.

    Parameters
    ----------
    problem
        With integer costs.
    fusable
        Stages whose backward may be fused; nothing is derived about their W's.
    """
    memory, m = problem.memory, problem.microbatches
    stages = problem.placement.stages_of[rank]
    chains = [(letter, stage) for letter in (F, I, W) for stage in stages]
    n = len(chains)
    if memory.limit is None or (m + 1) ** n > 2**62:
        return None
    delta = problem.arrays.delta
    room = memory.limit[rank] - memory.static[rank]
    room += 2 * MEMORY_TOLERANCE * abs(memory.limit[rank])
    change = np.array([delta[letter, stage] for letter, stage in chains])
    moves = list(_moves(problem, stages, fusable))
    power = (m + 1) ** np.arange(n, dtype=np.int64)
    layers = _reached(moves, power, change, room, m, n)
    if layers is None or not len(layers[-1]):
        return None
    return _read(problem, chains, fusable, moves, layers, power, change, room)


def _moves(problem: Problem, stages: tuple[int, ...], fusable: list[int]) -> Iterator[_ActionKind]:
    c, delta = len(stages), problem.arrays.delta
    for letter in (F, I, W):
        for k, stage in enumerate(stages):
            at = letter * c + k
            step = np.zeros(3 * c, dtype=np.int64)
            step[at] = 1
            if letter == F:
                need = at - 1 if k else -1
            elif letter == I:
                need = at + 1 if k + 1 < c else k
            else:
                need = at - c
            growth = max(0.0, float(delta[letter, stage]))
            needs = [(at, need)] if need >= 0 else []
            yield _ActionKind(step, needs, growth, [at])
            if letter == I and stage in fusable:
                both = step.copy()
                both[at + c] = 1
                yield _ActionKind(both, needs, max(0.0, float(delta[B, stage])), [at])


def _legal(move: _ActionKind, rows: IntArray, change: FloatArray, room: float, m: int) -> BoolArray:
    fine: BoolArray = rows @ change + move.growth <= room
    fine &= (rows + move.step <= m).all(axis=1)
    for mine, needed in move.needs:
        fine &= rows[:, mine] < rows[:, needed]
    return fine


def _reached(
    moves: list[_ActionKind], power: IntArray, change: FloatArray, room: float, m: int, n: int
) -> list[IntArray] | None:
    """States that can be reached, by the number of actions done; a state is coded in base m + 1."""
    layers: list[list[IntArray]] = [[] for _ in range(n * m + 1)]
    layers[0].append(np.zeros(1, dtype=np.int64))
    merged, total = [], 0
    for done, parts in enumerate(layers):
        keys = np.unique(np.concatenate(parts)) if parts else np.zeros(0, dtype=np.int64)
        merged.append(keys)
        total += len(keys)
        if total > MOST_STATES:
            return None
        rows = keys[:, None] // power % (m + 1)
        for move in moves:
            legal = _legal(move, rows, change, room, m)
            if legal.any():
                layers[done + int(move.step.sum())].append(keys[legal] + int(move.step @ power))
    return merged


def _read(
    problem: Problem,
    chains: list[Chain],
    fusable: list[int],
    moves: list[_ActionKind],
    layers: list[IntArray],
    power: IntArray,
    change: FloatArray,
    room: float,
) -> Implied:
    """Go backwards from everything done, and collect what all states before an action have in common."""
    m, n = problem.microbatches, len(chains)
    before = np.full((n, m, n), m, dtype=np.int64)
    head = np.full((n, m), np.iinfo(np.int64).max, dtype=np.int64)
    tail = head.copy()
    for done in range(len(layers) - 2, -1, -1):
        keys = layers[done]
        rows = keys[:, None] // power % (m + 1)
        alive = np.zeros(len(keys), dtype=bool)
        for move in moves:
            target = done + int(move.step.sum())
            if target >= len(layers):
                continue
            usable = _legal(move, rows, change, room, m)
            usable &= np.isin(keys + int(move.step @ power), layers[target])
            alive |= usable
            sources = rows[usable]
            if len(sources):
                work = _least_work(problem, chains, fusable, sources)
                left = _least_work(problem, chains, fusable, m - sources - move.step)
                for at in move.counted:
                    np.minimum.at(before[at], sources[:, at], sources)
                    np.minimum.at(head[at], sources[:, at], work)
                    np.minimum.at(tail[at], sources[:, at], left)
        layers[done] = keys[alive]
    for at, (letter, stage) in enumerate(chains):
        if letter == W and stage in fusable:
            before[:, :, at] = 0
            before[at], head[at], tail[at] = 0, 0, 0
    return Implied(chains, before, head, tail)


def _least_work(problem: Problem, chains: list[Chain], fusable: list[int], rows: IntArray) -> IntArray:
    """The least work of the actions that states (rows) count, with as many fused backwards as pay."""
    duration = problem.arrays.duration.astype(np.int64)
    cost = np.array([duration[letter, stage] for letter, stage in chains])
    work: IntArray = rows @ cost
    for stage in fusable:
        if (I, stage) in chains:
            saving = max(0, int(duration[I, stage] + duration[W, stage] - duration[B, stage]))
            work = work - saving * np.minimum(
                rows[:, chains.index((I, stage))], rows[:, chains.index((W, stage))]
            )
    return work
