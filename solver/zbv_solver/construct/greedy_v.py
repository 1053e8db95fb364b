"""The greedy V search: warm-up along the V, then rounds of one backward and one forward per rank.

W's are kept back and put into holes, or run when memory asks for it. Method: Qi et al., "Pipeline
Parallelism with Controllable Memory" (2024), section 3, and the ZB-VPP design notes for
``try_v_schedule`` and ``get_v_schedule``; here with costs and memory per stage and limits per rank, where
the published searches take averages. It may fail under tight limits; :mod:`.list_scheduling` then serves.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np

from zbv_solver.construct.board import (
    Attempt,
    Board,
    FloatArray,
    Instance,
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
from zbv_solver.jit import compiled
from zbv_solver.problem import B, F, I, Problem

MAX_RERUNS = 8


def get_v_schedule(problem: Problem) -> Iterator[Attempt]:
    """Orders of the four fill options, of the ways to fuse, and of true and mean costs."""
    for fuse_name, fuse in fuse_options(problem):
        true = make_instance(problem, fuse)
        mean = with_mean_costs(true)
        is_uneven = not np.array_equal(true.duration, mean.duration)
        for costs, instance in (("true", true), ("mean", mean))[: 1 + is_uneven]:
            for fill_forward, fill_backward in product((True, False), repeat=2):
                fills = f"fill_f={int(fill_forward)},fill_b={int(fill_backward)}"
                method = f"greedy-v({fills},costs={costs},fuse={fuse_name})"
                for board in _with_reruns(instance, fill_forward, fill_backward):
                    if instance is true:
                        yield Attempt.of(method, problem, board)
                    else:
                        yield Attempt.retimed(method, problem, board)


def fuse_options(problem: Problem) -> list[tuple[str, np.ndarray[tuple[int], np.dtype[np.bool_]]]]:
    """Stages to run fused: none; where B is cheaper, also the first stage (whose I feeds nobody), and all."""
    costs = problem.costs
    cheaper = np.array(
        [
            costs.fused(stage) < costs.backward_input[stage] + costs.backward_weight[stage]
            for stage in range(problem.n_stages)
        ]
    )
    none = np.zeros(problem.n_stages, dtype=np.bool_)
    if not cheaper.any():
        return [("none", none)]
    first = none.copy()
    first[0] = cheaper[0]
    return [("none", none), ("first", first), ("all", cheaper)]


def with_mean_costs(instance: Instance) -> Instance:
    """The instance with every letter's duration averaged over the stages.

    What published searches plan with. Its regular order is sometimes the better one on uneven stages.
    """
    mean = np.repeat(instance.duration.mean(axis=1, keepdims=True), instance.duration.shape[1], axis=1)
    return instance._replace(duration=mean)


def rank_loads(instance: Instance) -> FloatArray:
    """Busy time of every rank (p,) when the marked stages are fused and the others split."""
    split = instance.duration[:3].sum(axis=0)
    fused = instance.duration[F] + instance.duration[B]
    per_stage = np.where(instance.fuse, fused, split)
    loads: FloatArray = instance.microbatches * per_stage[instance.stages].sum(axis=1)
    return loads


def _with_reruns(instance: Instance, fill_forward: bool, fill_backward: bool) -> Iterator[Board]:
    """Complete boards, each with the bubbles of the one before as allowances, while they shrink."""
    loads = rank_loads(instance)
    surplus = loads.max() - loads
    allowance = np.zeros(len(loads))
    smallest = np.inf
    for _ in range(MAX_RERUNS):
        board = try_v_schedule(instance, fill_forward, fill_backward, surplus, allowance)
        excess = board.idle - surplus
        if not is_complete(board) or excess.max() >= smallest:
            return
        smallest = float(excess.max())
        allowance = excess.max() - excess
        yield board


@compiled
def try_v_schedule(
    instance: Instance,
    fill_forward: bool,
    fill_backward: bool,
    surplus: FloatArray,
    allowance: FloatArray,
) -> Board:  # pragma: no cover - compiled
    """One pass of the greedy.

    Parameters
    ----------
    fill_forward, fill_backward
        Whether a W may overfill a hole before an F, and before a chunk-1 backward.
    surplus
        (p,) idle time that a rank can have for free, because others have more work.
    allowance
        (p,) further idle time granted from the bubbles of the previous pass.
    """
    board = new_board(instance)
    p = instance.stages.shape[0]
    _warm_up(instance, board)
    wanted = np.empty(p, np.int64)
    worst = 0.0  # largest idle time beyond its surplus that any rank has so far
    progress = True
    while progress:
        progress = False
        for rank in range(p):
            wanted[rank] = _backward_chunk(instance, board, rank)
        for chunk in (0, 1):
            for step in range(p):
                rank = p - 1 - step if chunk == 0 else step
                if wanted[rank] == chunk:
                    slack = surplus[rank] + max(worst, allowance[rank]) - board.idle[rank]
                    fill = chunk == 0 or fill_backward
                    progress |= _fill_and_place(instance, board, rank, chunk, I, slack, fill)
                    worst = max(worst, board.idle[rank] - surplus[rank])
        for rank in range(p):
            chunk = _forward_chunk(instance, board, rank)
            if chunk >= 0:
                slack = surplus[rank] + max(worst, allowance[rank]) - board.idle[rank]
                progress |= _fill_and_place(instance, board, rank, chunk, F, slack, fill_forward)
                worst = max(worst, board.idle[rank] - surplus[rank])
    for rank in range(p):
        while pending_weight(board, rank) >= 0:
            place_weight(instance, board, rank)
    return board


@compiled
def _warm_up(instance: Instance, board: Board) -> None:  # pragma: no cover - compiled
    """Forwards until the first backward: down the V, back up with more forwards while memory allows."""
    p = instance.stages.shape[0]
    for rank in range(p):
        _try_forward(instance, board, rank, 0)
    for rank in range(p - 1, -1, -1):
        ready = arrival(instance, board, instance.stages[rank, 1], F)
        while (
            board.done[F, rank] < instance.microbatches
            and board.clock[rank] + instance.duration[F, rank] <= ready
            and _has_reserve(instance, board, rank)
        ):
            for upstream in range(rank + 1):
                _try_forward(instance, board, upstream, 0)
        _try_forward(instance, board, rank, 1)
    chunk = 0
    for rank in range(1, p):
        stalled = 0
        while stalled < 2 and (
            _forwards(board, rank) < _forwards(board, rank - 1)
            or board.done[F, 2 * p - 1 - rank] <= board.done[F, 2 * p - rank]
        ):
            placed = False
            for later in range(p - 1, rank - 1, -1):
                placed |= _try_forward(instance, board, later, chunk)
            stalled = 0 if placed else stalled + 1
            chunk = 1 - chunk


@compiled
def _forwards(board: Board, rank: int) -> int:  # pragma: no cover - compiled
    p = len(board.clock)
    return int(board.done[F, rank] + board.done[F, 2 * p - 1 - rank])


@compiled
def _has_reserve(instance: Instance, board: Board, rank: int) -> bool:  # pragma: no cover - compiled
    """Whether ranks 0 to ``rank`` keep room for the forwards that precede their first backward."""
    for upstream in range(rank + 1):
        pair = instance.delta[F, instance.stages[upstream]].sum()
        if board.held[upstream] + (rank + 1) * pair > instance.limit[upstream]:
            return False
    return True


@compiled
def _try_forward(instance: Instance, board: Board, rank: int, chunk: int) -> bool:  # pragma: no cover
    ready = arrival(instance, board, instance.stages[rank, chunk], F)
    if ready == np.inf or not admits_forward(instance, board, rank, chunk):
        return False
    place(instance, board, rank, chunk, F, ready)
    return True


@compiled
def _backward_chunk(instance: Instance, board: Board, rank: int) -> int:  # pragma: no cover - compiled
    """The chunk of this round's backward of a rank.

    Chunk 0 (the second half of a microbatch's way back) as soon as its input is there.
    """
    p, m = instance.stages.shape[0], instance.microbatches
    early, late = board.done[I, 2 * p - 1 - rank], board.done[I, rank]
    if late >= early:
        return 1
    if rank == p - 1 or early >= m or board.backward_end[rank + 1, late] < np.inf:
        return 0
    return 1


@compiled
def _forward_chunk(instance: Instance, board: Board, rank: int) -> int:  # pragma: no cover - compiled
    """The chunk of this round's forward of a rank, or -1: the second as soon as its input is there."""
    p = instance.stages.shape[0]
    down, up = board.done[F, rank], board.done[F, 2 * p - 1 - rank]
    if up < down and arrival(instance, board, 2 * p - 1 - rank, F) < np.inf:
        return 1
    if arrival(instance, board, rank, F) < np.inf:
        return 0
    return -1


@compiled
def _fill_and_place(
    instance: Instance, board: Board, rank: int, chunk: int, letter: int, slack: float, fill: bool
) -> bool:  # pragma: no cover - compiled
    """Put W's into the hole before an F or I, make room in memory, then place it if it can be placed."""
    ready = arrival(instance, board, instance.stages[rank, chunk], letter)
    if ready == np.inf:
        return False
    waiting = pending_weight(board, rank)
    while waiting >= 0:
        weight = instance.duration[2, instance.stages[rank, waiting]]
        fits = board.clock[rank] + weight <= ready
        overfills = fill and ready - board.clock[rank] > slack
        if not fits and not overfills:
            break
        place_weight(instance, board, rank)
        waiting = pending_weight(board, rank)
        if not fits:
            break
    if letter == F:
        while not admits_forward(instance, board, rank, chunk):
            if pending_weight(board, rank) < 0:
                return False
            place_weight(instance, board, rank)
        place(instance, board, rank, chunk, F, ready)
        return True
    while backward_letter(instance, board, rank, chunk) != I and pending_weight(board, rank) >= 0:
        if instance.fuse[instance.stages[rank, chunk]]:
            break
        place_weight(instance, board, rank)
    place(instance, board, rank, chunk, backward_letter(instance, board, rank, chunk), ready)
    return True
