"""The orders of ``torch.distributed.pipelining`` that no constructor makes, as lists of one rank.

They follow ``torch/distributed/pipelining/schedules.py`` of PyTorch 2.13. Steps without an action are left
out, because ranks wait for inputs and not for a clock.
"""

from __future__ import annotations

from zbv_solver.problem.problem import B, F, I, W

Actions = list[tuple[int, int, int]]
"""Stage, letter code, microbatch."""


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
