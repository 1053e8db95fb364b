"""Heads and tails of all operations of a problem, as zbv's bounds use them: Lemma 18."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from zbv_solver.bounds.directions import directions
from zbv_solver.bounds.ramps import Window, heads_and_tails
from zbv_solver.problem.problem import Problem

FloatArray = NDArray[np.float64]


def all_heads_and_tails(problem: Problem) -> tuple[FloatArray, FloatArray]:
    """Heads and tails (3, S, m), indexed [letter F, I or W, stage, microbatch]; a B is under I.

    The window of a makespan is that of all ranks; the window of a span is, for every operation, that of its
    own rank. A W's head and tail hold where it exists.
    """
    forwards, backwards = directions(problem)
    m = problem.microbatches
    head = np.zeros((3, problem.n_stages, m))
    tail = np.zeros_like(head)
    for rank, stages in enumerate(problem.placement.stages_of):
        opener = rank if problem.objective == "span" else None
        window = Window.of(forwards, backwards, opener, m, m)
        head[:, stages], tail[:, stages] = heads_and_tails(window, rank)
    return head, tail
