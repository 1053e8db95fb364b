"""Windows: the earliest start and the latest end of every action, relative to the objective's window."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zbv_solver.bounds.heads import END, FIRST, POST, SECOND
from zbv_solver.bounds.sides import Side, sides
from zbv_solver.problem.problem import F, I, Problem, W

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Windows:
    """Bounds on every action, valid for every order whose microbatches ascend per stage and letter.

    A stage's backward, I or B, is under the letter I. Where B can pay (:func:`.sides.may_fuse`), its bounds
    hold for both, and W's for a W that exists; elsewhere a B stands for an I with its W right behind.

    Attributes
    ----------
    head
        (3, S, m) float64, indexed [letter F, I or W, stage, microbatch]: least time from the window's
        origin to the action's start.
    tail
        Likewise, least time from the action's end to the window's end.

    The window of ``makespan`` is from the first start of all to the last end of all; that of ``span`` is,
    for every action, from its own rank's first start to that rank's last end.
    """

    head: FloatArray
    tail: FloatArray


def windows(problem: Problem) -> Windows:
    """Heads and tails of all actions; for ``span``, a sweep per rank. Lemma 18."""
    forwards, backwards = sides(problem)
    inputs = problem.arrays.duration[I]
    head = np.zeros((3, problem.n_stages, problem.microbatches))
    tail = np.zeros_like(head)
    if problem.objective == "makespan":
        _fill_in(head, tail, forwards, backwards, 0, True, range(problem.pp_degree), inputs)
        return Windows(head, tail)
    for rank in range(problem.pp_degree):
        origin = int(forwards.stages[rank, 0])
        _fill_in(head, tail, forwards, backwards, origin, False, (rank,), inputs)
    return Windows(head, tail)


def _fill_in(
    head: FloatArray,
    tail: FloatArray,
    forwards: Side,
    backwards: Side,
    origin: int,
    everywhere: bool,
    ranks: range | tuple[int, ...],
    inputs: FloatArray,
) -> None:
    """Write the rows of the ranks' stages."""
    m = head.shape[2]
    heads, tails = forwards.heads(origin, everywhere, m), backwards.heads(origin, everywhere, m)
    after = np.arange(m, dtype=np.float64)[::-1]
    for rank in ranks:
        for chunk, stage in enumerate(forwards.stages[rank]):
            head[F, stage], head[I, stage] = heads[FIRST, stage], heads[SECOND, stage]
            tail[F, stage], tail[I, stage] = tails[SECOND, stage, ::-1], tails[FIRST, stage, ::-1]
            if forwards.own[rank, chunk]:
                weight = forwards.work[rank, POST, chunk]
                head[W, stage] = heads[END, stage] - weight
                tail[W, stage] = after * weight
            else:
                head[W, stage] = heads[SECOND, stage] + inputs[stage]
