"""List scheduling by priority rules: any placement, any feasible memory limit.

The rank that can start something first does so; among its ready actions the rule decides. Forwards are
admitted only without risk of a deadlock (:func:`~.board.admits_forward`) and up to an in-flight cap, since
filling memory greedily hurts. Where the structured greedy fails for lack of memory, this serves.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zbv_solver.construct.board import (
    Attempt,
    Board,
    FloatArray,
    Instance,
    IntArray,
    admits_forward,
    arrival,
    backward_letter,
    is_complete,
    make_instance,
    new_board,
    pending_weight,
    place,
    place_weight,
)
from zbv_solver.construct.greedy_v import fuse_options
from zbv_solver.jit import compiled
from zbv_solver.problem import B, F, I, Problem, W

NOTHING = -1


class Rule(NamedTuple):
    """A priority rule.

    Attributes
    ----------
    rank_of_kind
        (2, chunks) float64: smaller goes first; row 0 forwards, row 1 backwards, by chunk.
    in_flight
        (p,) int64: most microbatches that a rank holds between its first F and its last backward.
    patience
        A W is started when it delays the next known arrival by no more than this share of its duration.
    """

    rank_of_kind: FloatArray
    in_flight: IntArray
    patience: float


PREFERENCES = {
    "backward-deep": ("I", "deep"),
    "backward-shallow": ("I", "shallow"),
    "forward-deep": ("F", "deep"),
}
"""Which letter goes first, and whether the later or the earlier half of its way goes first."""


def priority_schedules(problem: Problem, shares: tuple[float, ...] = (1.0, 0.75)) -> Iterator[Attempt]:
    """Orders of a small portfolio of rules; ``shares`` scale the in-flight caps that memory allows."""
    caps = in_flight_caps(problem)
    for fuse_name, fuse in fuse_options(problem):
        instance = make_instance(problem, fuse)
        for name, share, patience in product(PREFERENCES, shares, (0.0, 0.5)):
            in_flight = np.maximum(1, np.ceil(caps * share)).astype(np.int64)
            rule = Rule(_preference(problem, *PREFERENCES[name]), in_flight, patience)
            board = schedule(instance, rule)
            if is_complete(board):
                method = f"list({name},cap={share:g},patience={patience:g},fuse={fuse_name})"
                yield Attempt.of(method, problem, board)


def in_flight_caps(problem: Problem) -> NDArray[np.int64]:
    """Most microbatches in flight per rank (p,): what memory allows, and never more than 2p."""
    stages = np.array(problem.placement.stages_of)
    arrays = problem.arrays
    held = arrays.delta[F][stages].sum(axis=1)
    room = np.where(np.isfinite(arrays.limit), arrays.limit - arrays.static, np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        allowed = np.where(held > 0, room / np.maximum(held, 1e-300), np.inf)
    most = min(2 * problem.pp_degree, problem.microbatches)
    return np.clip(np.ceil(np.minimum(allowed, most)), 1, most).astype(np.int64)


def _preference(problem: Problem, letter: str, depth: str) -> FloatArray:
    chunks = problem.placement.chunks
    rank_of_kind = np.zeros((2, chunks))
    for chunk in range(chunks):
        forward = -chunk if depth == "deep" else chunk
        backward = chunk if depth == "deep" else -chunk
        rank_of_kind[0, chunk] = forward + (0 if letter == "F" else 100)
        rank_of_kind[1, chunk] = backward + (0 if letter == "I" else 100)
    return rank_of_kind


@compiled
def schedule(instance: Instance, rule: Rule) -> Board:  # pragma: no cover - compiled
    """Lay all actions; the board is incomplete if memory leaves nothing to do."""
    p = instance.stages.shape[0]
    board = new_board(instance)
    next_code = np.full(p, NOTHING, np.int64)
    next_start = np.full(p, np.inf)
    for rank in range(p):
        next_code[rank], next_start[rank] = _decide(instance, board, rule, rank)
    while True:
        rank = int(np.argmin(next_start))
        if next_start[rank] == np.inf:
            return board
        chunk, letter = next_code[rank] // 4, next_code[rank] % 4
        if letter == W:
            place_weight(instance, board, rank)
        else:
            place(instance, board, rank, chunk, letter, next_start[rank])
            stage = instance.stages[rank, chunk]
            consumer = stage + 1 if letter == F else stage - 1
            if 0 <= consumer < board.forward_end.shape[0]:
                other = _host(instance, consumer)
                if other != rank:
                    next_code[other], next_start[other] = _decide(instance, board, rule, other)
        next_code[rank], next_start[rank] = _decide(instance, board, rule, rank)


@compiled
def _host(instance: Instance, stage: int) -> int:  # pragma: no cover - compiled
    p = len(instance.stages)
    guess = stage % p
    here = instance.stages[guess, stage // p] == stage
    return int(guess if here else p - 1 - guess)


@compiled
def _decide(
    instance: Instance, board: Board, rule: Rule, rank: int
) -> tuple[int, float]:  # pragma: no cover - compiled
    """A rank's next action as a code, and when it starts; (NOTHING, inf) while all inputs are unknown."""
    clock = board.clock[rank]
    best_code, best_start, best_priority = NOTHING, np.inf, np.inf
    blocked = False
    chunks = instance.stages.shape[1]
    for chunk in range(chunks):
        stage = instance.stages[rank, chunk]
        for kind in range(2):
            letter = F if kind == 0 else I
            ready = arrival(instance, board, stage, letter)
            if ready == np.inf:
                continue
            if kind == 0:
                if chunk == 0 and not _below_cap(instance, board, rule, rank):
                    continue
                if not admits_forward(instance, board, rank, chunk):
                    blocked = True
                    continue
            else:
                letter = backward_letter(instance, board, rank, chunk)
                if letter == B and not instance.fuse[stage]:
                    blocked = True
            start = max(clock, ready)
            priority = rule.rank_of_kind[kind, chunk]
            if start < best_start or (start == best_start and priority < best_priority):
                best_code, best_start, best_priority = chunk * 4 + letter, start, priority
    waiting = pending_weight(board, rank)
    if waiting >= 0:
        weight = instance.duration[W, instance.stages[rank, waiting]]
        overlap = clock + weight - best_start
        if best_start > clock and overlap <= rule.patience * weight:
            return waiting * 4 + W, clock
        if blocked and (best_code == NOTHING or best_start > clock or best_code % 4 == B):
            return waiting * 4 + W, clock
    return best_code, best_start


@compiled
def _below_cap(instance: Instance, board: Board, rule: Rule, rank: int) -> bool:  # pragma: no cover
    first = instance.stages[rank, 0]
    return bool(board.done[F, first] - board.done[I, first] < rule.in_flight[rank])


def serial(problem: Problem) -> Attempt:
    """One microbatch after another with fused backwards: the plan that the smallest memory limit admits."""
    fuse = np.ones(problem.n_stages, dtype=np.bool_)
    instance = make_instance(problem, fuse)
    one = np.ones(problem.pp_degree, dtype=np.int64)
    board = schedule(instance, Rule(_preference(problem, "I", "deep"), one, 0.0))
    return Attempt.of("serial", problem, board)
