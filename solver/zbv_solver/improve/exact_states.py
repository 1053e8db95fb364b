"""What a rank's memory alone implies: every way of counting through its actions that fits the limit.

A rank's state is how many actions of each of its chains (a letter on a stage) it has done; with microbatches
ascending that says what it holds. The states on some path from nothing done to everything done are few when
memory is tight, and whatever is true on all of them is true of every order: which action comes before which,
and how much work a rank has done before an action at the least, and has left after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zbv_solver.problem.numeric import MEMORY_TOLERANCE
from zbv_solver.problem.problem import B, F, I, Problem, W

MOST_STATES = 200_000
"""Above this many states of a rank nothing is derived: memory is then not what binds."""

IntArray = NDArray[np.int64]
Chain = tuple[int, int]
"""(letter, stage); letter I stands for I or B."""


@dataclass(frozen=True, eq=False)
class Implied:
    """What is true of every order that fits a rank's memory.

    Attributes
    ----------
    chains
        The rank's chains.
    before
        (chains, m, chains): of every chain, how many actions end before a chain's j-th starts.
    head, tail
        (chains, m): the rank's least work before an action starts, and after it ends.
    """

    chains: list[Chain]
    before: IntArray
    head: IntArray
    tail: IntArray


@dataclass(frozen=True, eq=False)
class _Move:
    """One action: what it counts up, what it needs done more often than itself, and its memory."""

    step: IntArray
    needs: list[tuple[int, int]]
    growth: float
    counted: list[int]


def implied(problem: Problem, rank: int, fusable: list[int]) -> Implied | None:
    """Implications of a rank's limit, or None where there are too many states to look at.

    Parameters
    ----------
    problem
        With integer costs.
    fusable
        Stages whose backward may be fused; their W's are in no certain order and imply nothing.
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


def _moves(problem: Problem, stages: tuple[int, ...], fusable: list[int]) -> Iterator[_Move]:
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
            yield _Move(step, needs, growth, [at])
            if letter == I and stage in fusable:
                both = step.copy()
                both[at + c] = 1
                yield _Move(both, needs, max(0.0, float(delta[B, stage])), [at])


def _legal(
    move: _Move, rows: IntArray, change: NDArray[np.float64], room: float, m: int
) -> NDArray[np.bool_]:
    fine: NDArray[np.bool_] = rows @ change + move.growth <= room
    fine &= (rows + move.step <= m).all(axis=1)
    for mine, needed in move.needs:
        fine &= rows[:, mine] < rows[:, needed]
    return fine


def _reached(
    moves: list[_Move], power: IntArray, change: NDArray[np.float64], room: float, m: int, n: int
) -> list[IntArray] | None:
    """States that can be reached, by how many actions are done; coded in base m + 1."""
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
    moves: list[_Move],
    layers: list[IntArray],
    power: IntArray,
    change: NDArray[np.float64],
    room: float,
) -> Implied:
    """Go back from everything done, and note of every action what its states have in common."""
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
    """The least work of so many actions of every chain: with as many fused backwards as pay."""
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
