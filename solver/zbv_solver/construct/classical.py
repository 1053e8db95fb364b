"""Classical orders: action lists of a rank that follow from a rank's number, p, m and the chunks alone.

Those of PyTorch follow ``torch/distributed/pipelining/schedules.py`` of PyTorch 2.13. Steps without an action
are left out, because ranks wait for inputs and not for a clock.

V-half and V-min are V orders that hold a half and a third of 1F1B's activations, after Qi et al., "Pipeline
Parallelism with Controllable Memory" (NeurIPS 2024, arXiv 2405.15362). Their *building block* says when one
microbatch has its F's and I's on every rank, in units of one action, and is repeated every six units
(section 3, appendix A; `zbv_greedy.py` of sail-sg/zero-bubble has the offsets). It decides how much memory
the order holds, and the two free units of every six are for the W's. Then every action runs as early as the
memory of the repeated block allows, and W's fill the idle time: section 3.3 calls this squeezing and
reordering. The order is for equal durations of F, I and W, whatever those of the problem.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from zbv_solver.kernels.jit import IntArray, compiled
from zbv_solver.problem.problem import B, F, I, W

Rows = NDArray[np.int32]
"""A rank's list, (n, 3): stage, letter code, microbatch."""
Actions = list[tuple[int, int, int]]
"""The same as a list."""
PERIOD = 6
"""Units after which the block of V-half and V-min repeats: F, I and W of both chunks."""


def gpipe(rank: int, p: int, m: int) -> Rows:
    """All forwards, then all backwards (Huang et al. 2019)."""
    return _alternate(rank, m, m)


def one_f_one_b(rank: int, p: int, m: int) -> Rows:
    """Warm up with p - 1 - rank forwards, then one forward and one backward (Narayanan et al. 2019)."""
    return _alternate(rank, p - 1 - rank, m)


def overlapped_1f1b(rank: int, p: int, m: int) -> Rows:
    """1F1B with one forward more in the warm-up, so that all forwards after it can be in pairs."""
    return _alternate(rank, p - rank, m)


def eager_1f1b(rank: int, p: int, m: int) -> Rows:
    """1F1B with about twice the warm-up, 2 (p - 1 - rank), which hides transfers (Zhuang et al. 2022)."""
    return _alternate(rank, 2 * (p - 1 - rank), m)


def zb_h1(rank: int, p: int, m: int) -> Rows:
    """1F1B with a split backward and W's delayed by ``rank`` microbatches (Qi et al. 2023, section 2.2).

    After p - rank forwards a step repeats: an I, then a W once ``rank`` others are waiting, then an F while
    any is left. The remaining W's come last.
    """
    return _alternate_split(rank, p - 1 - rank, m)


def interleaved_1f1b(rank: int, p: int, m: int, chunks: int, group: int | None = None, more: int = 0) -> Rows:
    """Chunks take turns in rounds of about p microbatches (Narayanan et al. 2021, section 2.2).

    Rounds are as equal as m allows, so m need not be a multiple of p. With ``group``, every round has that
    many microbatches, and the last one has the rest. The warm-up has ``more`` forwards than usual: 1 if
    forwards run together with backwards (``overlap_moe_expert_parallel_comm`` in
    ``megatron/core/pipeline_parallel/schedules.py``).
    """
    bounds = equal_rounds(p, m) if group is None else np.append(np.arange(0, m, group), m)
    warm_up = (chunks - 1) * int(np.diff(bounds).max()) + 2 * (p - 1 - rank) + more
    return _in_turns(_alternate(rank, warm_up, chunks * m), bounds, chunks, p)


def grouped_interleaved(rank: int, p: int, m: int, chunks: int) -> Rows:
    """Interleaved 1F1B in groups of about p / 2 microbatches, which holds about half as much memory.

    A microbatch has its F on rank r and chunk c in slot 3 g c + r, with g = p / 2, rounded up. Its I's take
    one slot in three on their way back, and W's follow them. A microbatch begins every 3 ``chunks`` slots.
    Where chunks would share a slot, later ones have theirs a round later (Wan et al. 2025, arXiv 2503.01328;
    ``group_interleaved_1f1b.py`` of sail-sg/zero-bubble, with groups of one).
    """
    group, chunk, microbatch = (p + 1) // 2, np.arange(chunks)[:, None], np.arange(m)
    later = 3 * (group * chunk + chunk // (chunks // np.gcd(chunks, group)) + chunks * microbatch)
    forward = later + rank
    inputs = forward[-1, 0] + 3 * (p - 1 - rank) + 1 + later
    rows = np.empty((3, chunks, m, 3), dtype=np.int32)
    rows[..., 2] = microbatch
    for at, (letter, on) in enumerate(((F, chunk), (I, chunks - 1 - chunk), (W, chunks - 1 - chunk))):
        rows[at, ..., 0], rows[at, ..., 1] = on * p + rank, letter
    return rows.reshape(-1, 3)[np.argsort(np.stack([forward, inputs, inputs + 1]).ravel())]


def interleaved_zb_h1(rank: int, p: int, m: int, chunks: int) -> Rows:
    """ZB-H1 with chunks in turns as in :func:`interleaved_1f1b`: PyTorch's ``InterleavedZeroBubble``."""
    bounds = equal_rounds(p, m)
    warm_up = (chunks - 1) * int(np.diff(bounds).max()) + p - 1 - rank
    return _in_turns(_alternate_split(rank, warm_up, chunks * m), bounds, chunks, p)


def equal_rounds(p: int, m: int) -> NDArray[np.int64]:
    """Bounds of rounds of at least p microbatches that are as equal as possible, and one round if m < p."""
    rounds = max(1, m // p)
    return np.arange(rounds + 1) * m // rounds


def _in_turns(rows: Rows, bounds: NDArray[np.int64], chunks: int, p: int) -> Rows:
    """A rank's list for one stage and all turns, as the list for its chunks; ``bounds`` are the rounds'."""
    # The k-th forward: by round, then by chunk, then by microbatch.
    round_of = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds) * chunks)
    in_round = np.arange(chunks * int(bounds[-1])) - chunks * bounds[round_of]
    chunk, later = np.divmod(in_round, np.diff(bounds)[round_of])
    microbatch = bounds[round_of] + later
    turn, is_forward = rows[:, 2], rows[:, 1] == F
    rows[:, 0] += (np.where(is_forward, chunk[turn], chunks - 1 - chunk[turn]) * p).astype(np.int32)
    rows[:, 2] = microbatch[turn]
    return rows


def _alternate_split(rank: int, warm_up: int, m: int) -> Rows:
    """As :func:`_alternate` with split backwards: a W follows an I once ``rank`` others are waiting."""
    j, ahead = np.arange(m), warm_up + 1
    rows = np.empty((3 * m, 3), dtype=np.int32)
    # The place of an action is the number of F's, I's and W's before it.
    forward = j + np.maximum(j - ahead + 1, 0) + np.clip(j - ahead - rank + 1, 0, m)
    inputs = np.minimum(ahead + j, m) + j + np.maximum(j - rank, 0)
    weights = np.minimum(ahead + j + rank, m) + np.minimum(j + rank + 1, m) + j
    for letter, places in ((F, forward), (I, inputs), (W, weights)):
        rows[places, 1], rows[places, 2] = letter, j
    rows[:, 0] = rank
    return rows


def _alternate(stage: int, warm_up: int, m: int) -> Rows:
    """``warm_up`` forwards, then one forward and one backward in turn, then the remaining backwards."""
    k = np.arange(m)
    rows = np.empty((2 * m, 3), dtype=np.int32)
    # The place of an action is the number of F's and B's before it.
    for letter, places in (
        (F, k + np.maximum(k - warm_up, 0)),
        (B, k + np.minimum(warm_up + k + 1, m)),
    ):
        rows[places, 1], rows[places, 2] = letter, k
    rows[:, 0] = stage
    return rows


def looped_bfs(rank: int, p: int, m: int, chunks: int) -> Actions:
    """``ScheduleLoopedBFS``: all forwards stage by stage, then all backwards in reverse."""
    stages = range(rank, p * chunks, p)
    forwards = [(stage, F, j) for stage in stages for j in range(m)]
    return forwards + [(stage, B, j) for stage in reversed(stages) for j in reversed(range(m))]


class _Numbered:
    """A list of actions; every letter of every stage counts its own microbatches."""

    def __init__(self) -> None:
        self.actions: Actions = []
        self.count: dict[tuple[int, int], int] = {}
        self.waiting: list[tuple[int, int]] = []

    def made(self, stage: int, letter: int) -> int:
        """How many forwards (F) or backwards (I and B together) a stage has had."""
        return self.count.get((stage, letter), 0)

    def add(self, stage: int, letter: int) -> None:
        """Append a stage's next F, I or B."""
        counted = F if letter == F else I
        number = self.made(stage, counted)
        self.count[stage, counted] = number + 1
        self.actions.append((stage, letter, number))
        if letter == I:
            self.waiting.append((stage, number))

    def add_oldest_weight(self) -> None:
        """Append the W of the oldest I that has none, if there is one."""
        if self.waiting:
            stage, number = self.waiting.pop(0)
            self.actions.append((stage, W, number))

    def add_split(self, stage: int) -> None:
        """Append a stage's next I, and its W."""
        self.add(stage, I)
        self.add_oldest_weight()


def zbv(rank: int, p: int, m: int) -> Actions:
    """``ScheduleZBVZeroBubble``: ZB-V of Qi et al. 2023, section 6, for equal durations of F, I and W.

    With fewer than 2p - 1 microbatches, it is the order for that many without the additional ones.
    """
    down, up, n = rank, 2 * p - 1 - rank, max(2 * p - 1, m)
    made = _Numbered()
    for _ in range(2 * (p - rank) - 1):
        made.add(down, F)
    for _ in range(rank):
        made.add(up, F)
        made.add(down, F)
    for _ in range(p - rank):
        made.add(up, F)
        made.add_split(up)
    while made.made(up, F) < n:
        if made.made(down, F) < n:
            made.add(down, F)
        made.add_split(down)
        made.add(up, F)
        made.add_split(up)
    _zbv_end(made, rank, p)
    return [action for action in made.actions if action[2] < m]


def _zbv_end(made: _Numbered, rank: int, p: int) -> None:
    """The last backwards of ZB-V, and all W's that are left."""
    down, up = rank, 2 * p - 1 - rank
    for _ in range(rank):
        made.add(down, I)
        made.add(up, I)
    left = {stage: [number for host, number in made.waiting if host == stage] for stage in (down, up)}
    for _ in range(p - rank):
        left[down].append(made.made(down, I))
        made.add(down, I)
        made.actions.append((down, W, left[down].pop(0)))
    for stage in (up, down):
        made.actions += [(stage, W, number) for number in left[stage]]


def dualpipe_v(rank: int, p: int, m: int) -> Actions:
    """``ScheduleDualPipeV``, for at least 2p microbatches.

    PyTorch may overlap an F and a B that are next to each other. Here one follows the other, as in PyTorch
    without a custom function for overlapped actions.
    """
    down, up, later = rank, 2 * p - 1 - rank, p - rank - 1
    made = _Numbered()
    for _ in range(2 * later):
        made.add(down, F)
    for _ in range(rank + 1):
        made.add(down, F)
        made.add(up, F)
    for _ in range(later):
        made.add_split(up)
        made.add(up, F)
    for _ in range(m - 2 * p + rank + 1):
        for first, second in ((down, up), (up, down)):
            made.add(first, F)
            made.add(second, B)
    for _ in range(later):
        made.add(up, B)
        made.add(up, F)
        made.add(down, B)
    _dualpipe_end(made, rank, p)
    return made.actions


def _dualpipe_end(made: _Numbered, rank: int, p: int) -> None:
    """The last backwards of DualPipeV; the later half of them is split."""
    stages = (2 * p - 1 - rank, rank)
    # Backwards alternate between the chunks. Odd ranks begin to split with the chunk of late stages, even
    # ranks one backward later.
    first_split = 2 * ((rank + 1) // 2) + (1 - rank % 2)
    for number in range(2 * (rank + 1)):
        made.add(stages[number % 2], I if number >= first_split else B)
    for _ in range(p - rank - 1):
        made.add_oldest_weight()
        made.add(rank, I)
    for _ in range(rank + 1):
        made.add_oldest_weight()


def v_half(p: int, m: int) -> list[IntArray]:
    """The rows (6m, 3) of every rank; they hold 2 ⌊p/2⌋ + 2 forwards of a chunk, of 1F1B's 2p."""
    rank = np.arange(p)
    pause = 3 * (p % 2 == 0)
    block = (2 * rank, 3 * p - rank - 2, 3 * p + pause + 2 * rank - 1, 6 * p + pause - rank - 2)
    return _squeezed(m, np.stack(block, axis=1), 2 * (p // 2) + 2)


def v_min(p: int, m: int) -> list[IntArray]:
    """The rows (6m, 3) of every rank; they hold 2 ⌈(p - 1)/3⌉ + 2 forwards of a chunk, of 1F1B's 2p."""
    rank = np.arange(p)
    pause = 2 * (p % 3 == 0)
    block = (rank, 2 * p - rank - 1, 2 * p + pause + rank, 4 * p + pause - rank - 1)
    return _squeezed(m, np.stack(block, axis=1), 2 * -(-(p - 1) // 3) + 2)


def _squeezed(m: int, block: IntArray, most: int) -> list[IntArray]:
    """The orders of a block (p, 4), which has times of F and f, then of the I's of f and F."""
    tried = []
    for is_strict in (False, True):
        rows = np.zeros((len(block), PERIOD * m, 3), dtype=np.int32)
        tried.append((_run(m, block.astype(np.int64), most, is_strict, rows), rows))
    return list(min(tried, key=lambda timed: timed[0])[1])


@compiled
def _run(m: int, block: IntArray, most: int, is_strict: bool, rows: IntArray) -> int:
    """Unit by unit, every rank takes the action that is first in the block and may run, or else a W.

    The four kinds of actions are F, f, the I of f, and the I of F. An action is ahead of its turn if others
    come before it in the block. If strict, actions are ahead only in the warm-up and the end, as published.
    Returns the longest time between a rank's first and last action.
    """
    p = len(block)
    made, ready = np.zeros((p, 4), np.int64), np.zeros((p, 4), np.int64)  # now, and before the unit
    waiting = np.zeros((p, 2 * m, 2), np.int64)  # stages and microbatches of I's, in their order
    weights, length = np.zeros(p, np.int64), np.zeros(p, np.int64)
    begin, end = np.zeros(p, np.int64), np.zeros(p, np.int64)
    unit, left = 0, PERIOD * p * m
    while left > 0:
        ready[:] = made
        keeps_turns = is_strict and ready[0, 3] > 0 and ready[0, 0] < m
        for rank in range(p):
            kind = _next_kind(block, made, ready, weights, rank, m, most, keeps_turns)
            at = length[rank]
            if kind >= 0:
                stage, microbatch = rank if kind == 0 or kind == 3 else 2 * p - 1 - rank, made[rank, kind]
                rows[rank, at] = stage, F if kind < 2 else I, microbatch
                if kind >= 2:
                    waiting[rank, made[rank, 2] + made[rank, 3]] = stage, microbatch
                made[rank, kind] += 1
            elif weights[rank] < ready[rank, 2] + ready[rank, 3]:
                stage, microbatch = waiting[rank, weights[rank]]
                rows[rank, at] = stage, W, microbatch
                weights[rank] += 1
            else:
                continue
            begin[rank], end[rank] = unit if at == 0 else begin[rank], unit
            length[rank] += 1
            left -= 1
        unit += 1
    return int((end - begin).max())


@compiled
def _next_kind(
    block: IntArray,
    made: IntArray,
    ready: IntArray,
    weights: IntArray,
    rank: int,
    m: int,
    most: int,
    keeps_turns: bool,
) -> int:
    """The kind of action that a rank may run and that is first in the block; -1 if there is none."""
    chosen, first, count = -1, 0, made[rank]
    least = PERIOD * m + block[rank].max()
    for kind in range(4):
        if count[kind] < m:
            least = min(least, block[rank, kind] + PERIOD * count[kind])
    for kind in range(4):
        turn = block[rank, kind] + PERIOD * count[kind]
        if count[kind] >= m or (chosen >= 0 and turn > first) or (keeps_turns and turn > least):
            continue
        # F comes down the V and f goes back up; the I of f comes down, and the I of F goes back up.
        before = rank - 1 if kind == 0 or kind == 2 else rank + 1
        if before == len(block):
            has_input = ready[rank, kind - 1] > count[kind]
        else:
            has_input = before < 0 or ready[before, kind] > count[kind]
        if kind == 2:
            has_input = has_input and ready[rank, 1] > count[2]
        if kind == 3:
            has_input = has_input and ready[rank, 2] > count[3]
        held = count[0] + count[1] - weights[rank]
        if has_input and (kind >= 2 or (held < most and _has_room(block[rank], count, kind, turn, most))):
            chosen, first = kind, turn
    return chosen


@compiled
def _has_room(block: IntArray, made: IntArray, kind: int, turn: int, most: int) -> bool:
    """Whether all that comes before a forward in the block has enough memory after it, too.

    Otherwise ranks could wait for each other's memory. W's of finished I's can always run first.
    """
    done = made.copy()
    inside = made[0] + made[1] - made[2] - made[3] + 1
    while inside <= most:
        first, at = -1, turn
        for other in range(4):
            when = block[other] + PERIOD * done[other]
            if when < at:
                first, at = other, when
        if first < 0:
            return True
        inside += 1 if first < 2 else -1
        done[first] += 1
    return False
