"""The greedy V search: warm-up along the V, then rounds of one backward and one forward per rank.

W's are kept back and put into holes, or run when memory asks for it. Method: Qi et al., "Pipeline
Parallelism with Controllable Memory" (2024), section 3, and the ZB-VPP design notes for
``try_v_schedule`` and ``get_v_schedule``; here with costs and memory per stage and limits per rank, where
the published searches take averages. It may fail under tight limits; :mod:`.list_scheduling` then serves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from zbv_solver.construct.attempt import Attempt
from zbv_solver.construct.board import (
    CLOCK,
    HEAD,
    HELD,
    IDLE,
    TAIL,
    Board,
    admits_forward,
    arrival,
    clear,
    place,
)
from zbv_solver.construct.fusing import fuse_options
from zbv_solver.construct.tables import FloatArray, IntArray, Tables, make_tables
from zbv_solver.kernels.jit import compiled
from zbv_solver.problem.problem import B, F, I, Problem, W

MAX_RERUNS = 8
CHUNKS = 2
"""The V gives every rank two."""


@dataclass(frozen=True, eq=False)
class GreedyParameters:
    """What the greedy can be told.

    Attributes
    ----------
    fill_forward, fill_backward
        Whether a W may overfill a hole before an F, and before a chunk-1 backward.
    surplus
        (p,) idle time that a rank can have for free, because others have more work.
    allowance
        (p,) further idle time granted, as from the bubbles of the previous pass.
    warm_up_limit
        (p,) memory that the warm-up's forwards may count on.
    """

    fill_forward: bool
    fill_backward: bool
    surplus: FloatArray
    allowance: FloatArray
    warm_up_limit: FloatArray


class GreedyV:
    """Lays greedy V orders of one problem, on one board that is used again and again.

    With ``mean_costs`` it lays them for every letter's duration averaged over the stages, which is what
    published searches plan with: the regular order is sometimes the better one on uneven stages.
    """

    def __init__(
        self,
        problem: Problem,
        fuse: NDArray[np.bool_] | None = None,
        *,
        mean_costs: bool = False,
        halt: IntArray | None = None,
    ):
        self.problem = problem
        self.tables = make_tables(problem, fuse)
        self.is_true = True
        if mean_costs:
            mean = with_mean_costs(self.tables)
            self.is_true = np.array_equal(mean.duration, self.tables.duration)
            self.tables = mean
        self.board = Board.of(self.tables, halt)

    def default(self, fill_forward: bool = True, fill_backward: bool = True) -> GreedyParameters:
        """The published choice, with nothing known of bubbles yet."""
        loads, limit = self.tables.loads, self.tables.limit
        return GreedyParameters(
            fill_forward, fill_backward, loads.max() - loads, np.zeros(len(loads)), limit.copy()
        )

    def lay(self, parameters: GreedyParameters) -> bool:
        """Fill the board; whether all actions found a place."""
        tables, board = self.tables, self.board
        _lay(
            tables.row,
            tables.duration,
            tables.delta,
            tables.lag,
            tables.static,
            tables.limit,
            tables.fuse,
            parameters.fill_forward,
            parameters.fill_backward,
            parameters.surplus,
            parameters.allowance,
            parameters.warm_up_limit,
            board.level,
            board.count,
            board.end,
            board.queue,
            board.ends,
            board.code,
            board.length,
            board.halt,
        )
        return board.is_complete(tables)

    def attempt(self, method: str) -> Attempt:
        """What the complete board achieves under the true costs."""
        if self.is_true:
            return Attempt.of(method, self.problem, self.board)
        return Attempt.retimed(method, self.problem, self.board.code, self.board.length)


def get_v_schedule(problem: Problem) -> Iterator[Attempt]:
    """Orders of the four fill options, of the ways to fuse, and of true and mean costs."""
    for fuse_name, fuse in fuse_options(problem):
        for mean_costs in (False, True):
            greedy = GreedyV(problem, fuse, mean_costs=mean_costs)
            if mean_costs and greedy.is_true:
                break  # even stages: the same again
            for fill_forward, fill_backward in product((True, False), repeat=2):
                fills = f"fill_f={int(fill_forward)},fill_b={int(fill_backward)}"
                costs = "mean" if mean_costs else "true"
                method = f"greedy-v({fills},costs={costs},fuse={fuse_name})"
                for _ in _with_reruns(greedy, greedy.default(fill_forward, fill_backward)):
                    yield greedy.attempt(method)


def with_mean_costs(tables: Tables) -> Tables:
    """The tables with every letter's duration averaged over the stages."""
    letters = tables.duration.reshape(-1, 4).mean(axis=0)
    return replace(tables, duration=np.tile(letters, (tables.pp_degree, tables.chunks)))


def _with_reruns(greedy: GreedyV, parameters: GreedyParameters) -> Iterator[GreedyParameters]:
    """Complete boards, each with the bubbles of the one before as allowances, while they shrink."""
    smallest = np.inf
    for _ in range(MAX_RERUNS):
        complete = greedy.lay(parameters)
        excess = greedy.board.level[:, IDLE] - parameters.surplus
        if not complete or excess.max() >= smallest:
            return
        smallest = float(excess.max())
        yield parameters
        parameters = replace(parameters, allowance=excess.max() - excess)


@compiled
def _lay(
    row: IntArray,
    duration: FloatArray,
    delta: FloatArray,
    lag: FloatArray,
    static: FloatArray,
    limit: FloatArray,
    fuse: NDArray[np.bool_],
    fill_forward: bool,
    fill_backward: bool,
    surplus: FloatArray,
    allowance: FloatArray,
    warm_up_limit: FloatArray,
    level: FloatArray,
    count: IntArray,
    end: FloatArray,
    queue: IntArray,
    ends: IntArray,
    code: IntArray,
    length: IntArray,
    halt: IntArray,
) -> None:  # pragma: no cover - compiled
    """One pass of the greedy: warm-up, rounds of one backward and one forward a rank, the W's left over."""
    p = row.shape[0]
    clear(static, level, count, ends, length)
    # fmt: off
    _warm_up(
        row, duration, delta, lag, limit, warm_up_limit, level, count, end, queue, ends, code, length
    )
    # fmt: on
    wanted = np.empty(p, np.int64)
    worst = 0.0  # largest idle time beyond its surplus that any rank has so far
    progress = True
    while progress and not halt[0]:
        progress = False
        for rank in range(p):
            wanted[rank] = _backward_chunk(row, count, end.shape[1], rank)
        for turn in range(3 * p):
            chunk = turn // p
            rank = p - 1 - turn if chunk == 0 else turn % p
            if chunk < CHUNKS:
                if wanted[rank] != chunk:
                    continue
                action, fill = 4 * chunk + I, chunk == 0 or fill_backward
            else:
                action, fill = _forward_action(row, lag, count, end, rank), fill_forward
                if action < 0:
                    continue
            slack = surplus[rank] + max(worst, allowance[rank]) - level[rank, IDLE]
            # fmt: off
            progress |= _fill_and_place(
                row, duration, delta, lag, limit, fuse, level, count, end, queue, ends, code, length,
                rank, action, slack, fill,
            )
            # fmt: on
            worst = max(worst, level[rank, IDLE] - surplus[rank])
    for rank in range(p):
        while ends[rank, HEAD] < ends[rank, TAIL]:
            # fmt: off
            _place_weight(row, duration, delta, level, count, end, queue, ends, code, length, rank)
            # fmt: on


@compiled
def _warm_up(
    row: IntArray,
    duration: FloatArray,
    delta: FloatArray,
    lag: FloatArray,
    limit: FloatArray,
    warm_up_limit: FloatArray,
    level: FloatArray,
    count: IntArray,
    end: FloatArray,
    queue: IntArray,
    ends: IntArray,
    code: IntArray,
    length: IntArray,
) -> None:  # pragma: no cover - compiled
    """Forwards until the first backward: down the V, back up with more forwards while memory allows."""
    p, m = row.shape[0], end.shape[1]
    # fmt: off
    for rank in range(p):
        _try_forward(
            row, duration, delta, lag, limit, level, count, end, queue, ends, code, length, rank, 0
        )
    for rank in range(p - 1, -1, -1):
        ready = arrival(row, lag, count, end, rank, 4 + F)
        placed = True
        while (
            placed
            and count[row[rank, F]] < m
            and level[rank, CLOCK] + duration[rank, F] <= ready
            and _has_reserve(delta, warm_up_limit, level, rank)
        ):
            placed = False
            for upstream in range(rank + 1):
                placed |= _try_forward(
                    row, duration, delta, lag, limit, level, count, end, queue, ends, code, length,
                    upstream, 0,
                )
        _try_forward(
            row, duration, delta, lag, limit, level, count, end, queue, ends, code, length, rank, 1
        )
    chunk = 0
    for rank in range(1, p):
        stalled = 0
        while stalled < CHUNKS and (
            _forwards(row, count, rank) < _forwards(row, count, rank - 1)
            or count[row[rank, 4 + F]] <= count[row[rank - 1, 4 + F]]
        ):
            placed = False
            for later in range(p - 1, rank - 1, -1):
                placed |= _try_forward(
                    row, duration, delta, lag, limit, level, count, end, queue, ends, code, length,
                    later, chunk,
                )
            stalled = 0 if placed else stalled + 1
            chunk = 1 - chunk
    # fmt: on


@compiled
def _forwards(row: IntArray, count: IntArray, rank: int) -> int:  # pragma: no cover - compiled
    return int(count[row[rank, F]] + count[row[rank, 4 + F]])


@compiled
def _has_reserve(
    delta: FloatArray, warm_up_limit: FloatArray, level: FloatArray, rank: int
) -> bool:  # pragma: no cover - compiled
    """Whether ranks 0 to ``rank`` keep room for the forwards that precede their first backward."""
    for upstream in range(rank + 1):
        pair = delta[upstream, F] + delta[upstream, 4 + F]
        if level[upstream, HELD] + (rank + 1) * pair > warm_up_limit[upstream]:
            return False
    return True


@compiled
def _try_forward(
    row: IntArray,
    duration: FloatArray,
    delta: FloatArray,
    lag: FloatArray,
    limit: FloatArray,
    level: FloatArray,
    count: IntArray,
    end: FloatArray,
    queue: IntArray,
    ends: IntArray,
    code: IntArray,
    length: IntArray,
    rank: int,
    chunk: int,
) -> bool:  # pragma: no cover - compiled
    ready = arrival(row, lag, count, end, rank, 4 * chunk + F)
    if ready == np.inf or not admits_forward(row, delta, limit, level, count, rank, chunk):
        return False
    # fmt: off
    place(
        row, duration, delta, level, count, end, queue, ends, code, length, rank, 4 * chunk + F, ready
    )
    # fmt: on
    return True


@compiled
def _backward_chunk(row: IntArray, count: IntArray, m: int, rank: int) -> int:  # pragma: no cover - compiled
    """The chunk of this round's backward of a rank.

    Chunk 0 (the second half of a microbatch's way back) as soon as its input is there.
    """
    early, late = count[row[rank, 4 + I]], count[row[rank, I]]
    if late >= early:
        return 1
    if rank == row.shape[0] - 1 or early >= m or count[row[rank, I] - 1] > late:
        return 0
    return 1


@compiled
def _forward_action(
    row: IntArray, lag: FloatArray, count: IntArray, end: FloatArray, rank: int
) -> int:  # pragma: no cover - compiled
    """This round's forward of a rank as a code, or -1: the second chunk as soon as its input is there."""
    down, up = count[row[rank, F]], count[row[rank, 4 + F]]
    if up < down and arrival(row, lag, count, end, rank, 4 + F) < np.inf:
        return 4 + F
    if arrival(row, lag, count, end, rank, F) < np.inf:
        return F
    return -1


@compiled
def _place_weight(
    row: IntArray,
    duration: FloatArray,
    delta: FloatArray,
    level: FloatArray,
    count: IntArray,
    end: FloatArray,
    queue: IntArray,
    ends: IntArray,
    code: IntArray,
    length: IntArray,
    rank: int,
) -> None:  # pragma: no cover - compiled
    """Lay the oldest waiting W of a rank."""
    weight = 4 * queue[rank, ends[rank, HEAD]] + W
    clock = level[rank, CLOCK]
    place(row, duration, delta, level, count, end, queue, ends, code, length, rank, weight, clock)


@compiled
def _fill_and_place(
    row: IntArray,
    duration: FloatArray,
    delta: FloatArray,
    lag: FloatArray,
    limit: FloatArray,
    fuse: NDArray[np.bool_],
    level: FloatArray,
    count: IntArray,
    end: FloatArray,
    queue: IntArray,
    ends: IntArray,
    code: IntArray,
    length: IntArray,
    rank: int,
    action: int,
    slack: float,
    fill: bool,
) -> bool:  # pragma: no cover - compiled
    """Put W's into the hole before an F or I, make room in memory, then place it if it can be placed."""
    ready = arrival(row, lag, count, end, rank, action)
    if ready == np.inf:
        return False
    chunk = action >> 2
    # fmt: off
    while ends[rank, HEAD] < ends[rank, TAIL]:
        weight = 4 * queue[rank, ends[rank, HEAD]] + W
        fits = level[rank, CLOCK] + duration[rank, weight] <= ready
        overfills = fill and ready - level[rank, CLOCK] > slack
        if not fits and not overfills:
            break
        _place_weight(row, duration, delta, level, count, end, queue, ends, code, length, rank)
        if not fits:
            break
    if action & 3 == F:
        while not admits_forward(row, delta, limit, level, count, rank, chunk):
            if ends[rank, HEAD] == ends[rank, TAIL]:
                return False
            _place_weight(row, duration, delta, level, count, end, queue, ends, code, length, rank)
    elif fuse[rank, chunk]:
        action = 4 * chunk + B
    else:
        grows = max(0.0, delta[rank, action])
        while level[rank, HELD] + grows > limit[rank] and ends[rank, HEAD] < ends[rank, TAIL]:
            _place_weight(row, duration, delta, level, count, end, queue, ends, code, length, rank)
        if level[rank, HELD] + grows > limit[rank]:
            action = 4 * chunk + B
    place(row, duration, delta, level, count, end, queue, ends, code, length, rank, action, ready)
    # fmt: on
    return True
