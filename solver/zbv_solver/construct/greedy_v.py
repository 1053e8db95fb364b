"""The greedy V search: warm-up along the V, then rounds of one backward and one forward per rank.

W's are held back and fill idle time, or run when memory must be released. Method: Qi et al., "Pipeline
Parallelism with Controllable Memory" (2024), section 3, and the ZB-VPP design notes for ``try_v_schedule``
and ``get_v_schedule``. The published searches take average costs; here costs and memory are per stage, and
limits per rank. The greedy may fail under tight limits, where :mod:`.dispatch` takes over.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np

from zbv_solver.construct.board import (
    CLOCK,
    HELD,
    IDLE,
    NOTHING,
    Attempt,
    Board,
    admits_forward,
    arrival,
    clear,
    is_complete,
    next_kind,
    oldest_weight,
    place,
)
from zbv_solver.construct.rules import PEAKS, mountain
from zbv_solver.construct.tables import Tables, fuse_options, make_tables, sizes
from zbv_solver.kernels.jit import ZERO, BoolArray, FloatArray, IntArray, compiled, compiled_leaf
from zbv_solver.problem.problem import B, F, I, Problem

MAX_RERUNS = 8
GREEDY_COST = 4
"""Actions of list scheduling that one action of the greedy counts for in budgets. It decides which plans a
search finds, so it does not follow the kernels' speed."""
CHUNKS = 2
"""Chunks per rank in a V."""
OUTER, INNER = ZERO, ZERO + 1
"""The chunks of a rank."""


class GreedyParameters(NamedTuple):
    """The parameters of one pass of the greedy."""

    fill_forward: bool
    """Whether a W longer than the idle time before an F may run in it."""
    fill_backward: bool
    """The same before a backward of chunk 1."""
    surplus: FloatArray
    """(p,): idle time that costs nothing on a rank, because other ranks have more work."""
    allowance: FloatArray
    """(p,): further idle time allowed, such as the bubbles of the previous pass."""
    warm_up_limit: FloatArray
    """(p,): memory that the forwards of the warm-up may use."""
    entry: IntArray
    """(m,): the microbatch that enters as the k-th."""


class GreedyV:
    """Constructs greedy V orders of one problem, on one board that is reused.

    With ``mean_costs`` every letter's duration is averaged over the stages, as in the published searches: on
    uneven stages the regular order is sometimes the better one.
    """

    def __init__(
        self,
        problem: Problem,
        fuse: BoolArray | None = None,
        *,
        mean_costs: bool = False,
        halt: IntArray | None = None,
    ):
        self.problem = problem
        self.tables = make_tables(problem, fuse)
        self.has_true_costs = True
        if mean_costs:
            letters = self.tables.duration.reshape(-1, 4, self.tables.kinds).mean(axis=0)
            mean = np.tile(letters, (problem.pp_degree, CHUNKS, 1))
            self.has_true_costs = np.array_equal(mean, self.tables.duration)
            self.tables = self.tables._replace(duration=mean)
        self.board = Board.of(self.tables, halt)

    def default(
        self, fill_forward: bool = True, fill_backward: bool = True, peak: float = PEAKS[0]
    ) -> GreedyParameters:
        """The published parameters, for a first pass."""
        loads, limit = self.tables.loads(), self.tables.limit
        return GreedyParameters(
            fill_forward,
            fill_backward,
            loads.max() - loads,
            np.zeros(len(loads)),
            limit.copy(),
            mountain(sizes(self.problem), peak),
        )

    def lay(self, parameters: GreedyParameters) -> bool:
        """Fill the board; whether all actions were placed."""
        tables, board = self.tables, self.board
        if not self.problem.is_equal:
            tables.enter(parameters.entry, self.problem.arrays.kind_of)
        _lay(tables, board, parameters)
        return is_complete(tables, board)

    def attempt(self, method: str) -> Attempt:
        """The complete board as an order, timed with the true costs."""
        if self.has_true_costs:
            return Attempt.of(method, self.problem, self.tables, self.board)
        return Attempt.retimed(method, self.problem, self.board.code, self.board.length, self.tables.entry)


def get_v_schedule(problem: Problem) -> Iterator[Attempt]:
    """Orders of the four fill options, for every way to fuse, with true and mean costs."""
    for fuse_name, fuse in fuse_options(problem):
        for mean_costs in (False, True):
            greedy = GreedyV(problem, fuse, mean_costs=mean_costs)
            if mean_costs and greedy.has_true_costs:
                break  # all stages are equal, so the orders would be the same
            peaks = PEAKS[:1] if problem.is_equal else PEAKS
            for fill_forward, fill_backward, peak in product((True, False), (True, False), peaks):
                fills = f"fill_f={int(fill_forward)},fill_b={int(fill_backward)}"
                costs = "mean" if mean_costs else "true"
                method = f"greedy-v({fills},costs={costs},fuse={fuse_name})"
                for _ in _with_reruns(greedy, greedy.default(fill_forward, fill_backward, peak)):
                    yield greedy.attempt(method)


def _with_reruns(greedy: GreedyV, parameters: GreedyParameters) -> Iterator[GreedyParameters]:
    """Complete boards, each with the bubbles of the previous one as allowances, while the bubbles shrink."""
    smallest = np.inf
    for _ in range(MAX_RERUNS):
        complete = greedy.lay(parameters)
        excess = greedy.board.level[:, IDLE] - parameters.surplus
        if not complete or excess.max() >= smallest:
            return
        smallest = float(excess.max())
        yield parameters
        parameters = parameters._replace(allowance=excess.max() - excess)


@compiled
def _lay(tables: Tables, board: Board, parameters: GreedyParameters) -> None:  # pragma: no cover - compiled
    """One pass: the warm-up, rounds of one backward and one forward per rank, and the remaining W's."""
    p, idle = len(tables.position), board.level[:, IDLE]
    clear(tables, board)
    _warm_up(tables, board, parameters.warm_up_limit)
    wanted = np.empty(p, np.int64)
    worst = 0.0  # largest idle time beyond its surplus that any rank has so far
    # At rank + 1: the last round in which the rank or a neighbour placed an F or a backward. A rank that
    # places nothing in the round after that has nothing to place until the next such change.
    touched, rounds, progress = np.zeros(p + 2, np.int64), 0, True
    while progress and not board.halt[0]:
        progress = False
        rounds += 1
        for rank in range(p):
            if touched[rank + 1] >= rounds - 1:
                wanted[rank] = _backward_chunk(tables, board, rank)
        # Backwards of chunk 0 from the last rank to the first, then of chunk 1 from the first to the last,
        # then forwards. Each chunk is visited in the direction in which its backwards travel, so an output
        # can be the input of the next rank in the same round.
        for turn in range(3 * p):
            chunk = turn // p
            rank = p - 1 - turn if chunk == 0 else turn - chunk * p
            if touched[rank + 1] < rounds - 1:
                continue
            if chunk < CHUNKS:
                if wanted[rank] != chunk:
                    continue
                action, fill = 4 * chunk + I, chunk == 0 or parameters.fill_backward
            else:
                action, fill = _forward_action(tables, board, rank), parameters.fill_forward
                if action < 0:
                    continue
            # What this rank may still idle before it exceeds both its allowance and the worst rank so far.
            slack = parameters.surplus[rank] + max(worst, parameters.allowance[rank]) - idle[rank]
            if _fill_and_place(tables, board, rank, action, slack, fill):
                progress = True
                touched[rank] = touched[rank + 1] = touched[rank + 2] = rounds
            worst = max(worst, idle[rank] - parameters.surplus[rank])
    for rank in range(p):
        while _place_weight(tables, board, rank):
            pass


@compiled_leaf
def _warm_up(tables: Tables, board: Board, warm_up_limit: FloatArray) -> None:  # pragma: no cover - compiled
    """Forwards until the first backward: down the V, back up with more forwards while memory allows."""
    position, placed, level = tables.position, board.placed, board.level
    p, m = len(position), board.end.shape[1]
    for rank in range(p):
        _try_forward(tables, board, rank, OUTER)
    for rank in range(p - 1, -1, -1):
        ready = arrival(tables, board, tables.position[rank, 4 + F])
        # A rank that waits for its first F of chunk 1 takes more F's of chunk 0, with all earlier ranks,
        # while such an F, started now, ends before that input arrives.
        progress = True
        while (
            progress
            and placed[position[rank, F]] < m
            and level[rank, CLOCK] + tables.duration[rank, F, next_kind(tables, board, rank, ZERO)] <= ready
            and _has_reserve(tables, board, warm_up_limit, rank)
        ):
            progress = False
            for upstream in range(rank + 1):
                progress |= _try_forward(tables, board, upstream, OUTER)
        _try_forward(tables, board, rank, INNER)
    # Afterwards every rank needs at least as many F's as the previous rank, and more of chunk 1, which flows
    # towards rank 0. Chunks alternate; a rank gives up once neither chunk makes progress.
    chunk = OUTER
    for rank in range(1, p):
        stalled = 0
        while stalled < CHUNKS and (
            _forwards(position, placed, rank) < _forwards(position, placed, rank - 1)
            or placed[position[rank, 4 + F]] <= placed[position[rank - 1, 4 + F]]
        ):
            progress = False
            for later in range(p - 1, rank - 1, -1):
                progress |= _try_forward(tables, board, later, chunk)
            stalled = 0 if progress else stalled + 1
            chunk = INNER - chunk


@compiled_leaf
def _forwards(position: IntArray, placed: IntArray, rank: int) -> int:  # pragma: no cover - compiled
    return int(placed[position[rank, F]] + placed[position[rank, 4 + F]])


@compiled_leaf
def _has_reserve(
    tables: Tables, board: Board, warm_up_limit: FloatArray, rank: int
) -> bool:  # pragma: no cover - compiled
    """Whether ranks 0 to ``rank`` keep memory for the forwards that precede their first backward.

    Where microbatches differ, those are taken to be like the next one of the rank.
    """
    delta = tables.delta
    for upstream in range(rank + 1):
        kind = tables.kind[min(board.placed[tables.position[upstream, F]], len(tables.kind) - 1)]
        pair = delta[upstream, F, kind] + delta[upstream, 4 + F, kind]
        if board.level[upstream, HELD] + (rank + 1) * pair > warm_up_limit[upstream]:
            return False
    return True


@compiled_leaf
def _try_forward(tables: Tables, board: Board, rank: int, chunk: int) -> bool:  # pragma: no cover - compiled
    """Place the next F of a chunk if its input has a known arrival and memory admits it."""
    ready = arrival(tables, board, tables.position[rank, 4 * chunk + F])
    if ready == np.inf or not admits_forward(tables, board, rank, chunk):
        return False
    place(tables, board, rank, 4 * chunk + F, ready)
    return True


@compiled_leaf
def _backward_chunk(tables: Tables, board: Board, rank: int) -> int:  # pragma: no cover - compiled
    """The chunk of this round's backward on a rank.

    Chunk 0 (the second half of a microbatch's way back) as soon as its input is there.
    """
    position, placed = tables.position, board.placed
    early, late = placed[position[rank, 4 + I]], placed[position[rank, I]]
    # Chunk 0 follows chunk 1 on the way back, so it cannot overtake it. Its input is known if it comes from
    # this rank's chunk 1 (last rank) or if the previous position has already run that microbatch.
    if late >= early:
        return 1
    if rank == len(position) - 1 or early >= board.end.shape[1] or placed[position[rank, I] - 1] > late:
        return 0
    return 1


@compiled_leaf
def _forward_action(tables: Tables, board: Board, rank: int) -> int:  # pragma: no cover - compiled
    """The code of this round's forward on a rank, or -1: the second chunk as soon as its input is there."""
    down, up = board.placed[tables.position[rank, F]], board.placed[tables.position[rank, 4 + F]]
    if up < down and arrival(tables, board, tables.position[rank, 4 + F]) < np.inf:
        return 4 + F
    if arrival(tables, board, tables.position[rank, OUTER + F]) < np.inf:
        return F
    return -1


@compiled_leaf
def _place_weight(tables: Tables, board: Board, rank: int) -> bool:  # pragma: no cover - compiled
    """Place the oldest waiting W of a rank; False if none waits."""
    weight = oldest_weight(tables, board, rank)
    if weight == NOTHING:
        return False
    place(tables, board, rank, weight, board.level[rank, CLOCK])
    return True


@compiled_leaf
def _fill_and_place(
    tables: Tables, board: Board, rank: int, action: int, slack: float, fill: bool
) -> bool:  # pragma: no cover - compiled
    """Fill the hole before an F or I with W's, free memory with more W's, then place it if possible."""
    ready = arrival(tables, board, tables.position[rank, action])
    if ready == np.inf:
        return False
    chunk, limit = action >> 2, tables.limit[rank]
    level, weight = board.level, oldest_weight(tables, board, rank)
    # W's that end before the input arrives cost nothing. After them, one W may end later, if the hole that
    # remains is larger than the slack.
    while weight != NOTHING:
        takes = tables.duration[rank, weight, next_kind(tables, board, rank, weight)]
        fits = level[rank, CLOCK] + takes <= ready
        overfills = fill and ready - level[rank, CLOCK] > slack
        if not fits and not overfills:
            break
        place(tables, board, rank, weight, level[rank, CLOCK])
        if not fits:
            break
        weight = oldest_weight(tables, board, rank)
    if action & 3 == F:
        while not admits_forward(tables, board, rank, chunk):
            if not _place_weight(tables, board, rank):
                return False
    elif tables.fuse[rank, chunk]:
        action = 4 * chunk + B
    else:
        # Release memory with W's first. If it still does not suffice, fuse: a B releases at once what its W
        # would.
        grows = max(0.0, tables.delta[rank, action, next_kind(tables, board, rank, action)])
        while level[rank, HELD] + grows > limit and _place_weight(tables, board, rank):
            pass
        if level[rank, HELD] + grows > limit:
            action = 4 * chunk + B
    place(tables, board, rank, action, ready)
    return True
