"""How fast orders are evaluated: whole ones, and ones that differ from the last by a small move."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from zbv_solver.construct.attempt import from_orders
from zbv_solver.construct.greedy_v import get_v_schedule
from zbv_solver.construct.tables import FloatArray, IntArray, make_tables
from zbv_solver.improve.annealing import anneal
from zbv_solver.improve.order_state import evaluate_codes
from zbv_solver.kernels.jit import compiled
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.stage_document import parse_problem

REPEATS = 5


@dataclass(frozen=True)
class Speed:
    """Evaluations per second on one core.

    Attributes
    ----------
    whole
        Earliest times of a whole order, from its codes.
    judged
        Moves whose effect on the objective annealing works out from heads and tails, while also
    applied
        doing so many of them, each with heads, tails, memory and the critical path repaired.
    """

    pp_degree: int
    microbatches: int
    actions: int
    whole: float
    judged: float
    applied: float


def measure_speed(p: int, m: int, seconds: float = 1.0) -> Speed:
    """Speed at p ranks and m microbatches, the best of a few repetitions of about ``seconds`` in all."""
    problem = _problem(p, m)
    start = next(get_v_schedule(problem)).orders
    anneal(problem, start, moves=10, temperature=1.0, seed=0)  # loads the kernels
    rounds = max(1, int(seconds / REPEATS / 1e-8 / problem.max_actions))
    whole = max(_whole_per_second(problem, rounds) for _ in range(REPEATS))
    judged = applied = 0.0
    for seed in range(REPEATS):
        began = time.perf_counter()
        made = anneal(problem, start, moves=max(10, rounds // 4), temperature=0.01, seed=seed)
        seconds_used = time.perf_counter() - began
        judged = max(judged, made.looked / seconds_used)
        applied = max(applied, made.moves / seconds_used)
    return Speed(p, m, problem.max_actions, whole, judged, applied)


def _problem(p: int, m: int) -> Problem:
    """Uneven stages at 1F1B's memory."""
    costs = [20 + (7 * stage) % 5 for stage in range(2 * p)]
    return parse_problem(
        {
            "pp_degree": p,
            "microbatches": m,
            "objective": "makespan",
            "costs": {"forward": costs, "backward_input": costs, "backward_weight": 14, "p2p": 1},
            "memory": {"forward": 2, "backward_input": -1, "backward_weight": -1, "limit": 4 * p},
        }
    )


def _whole_per_second(problem: Problem, rounds: int) -> float:
    tables = make_tables(problem)
    code, length = from_orders(next(get_v_schedule(problem)).orders, problem)
    p, rows = problem.pp_degree, len(tables.lag)
    done, clock = np.zeros((rows, problem.microbatches)), np.zeros(p)
    cursor, count = np.zeros(p, np.int64), np.zeros(rows, np.int64)
    arguments = (code, length, tables.row, tables.duration, tables.lag, done, cursor, count, clock)
    _again_and_again(1, *arguments)  # loads the kernel
    began = time.perf_counter()
    _again_and_again(rounds, *arguments)
    return rounds / (time.perf_counter() - began)


@compiled
def _again_and_again(
    rounds: int,
    code: IntArray,
    length: IntArray,
    row: IntArray,
    duration: FloatArray,
    lag: FloatArray,
    done: FloatArray,
    cursor: IntArray,
    count: IntArray,
    clock: FloatArray,
) -> None:  # pragma: no cover - compiled
    for _ in range(rounds):
        evaluate_codes(code, length, row, duration, lag, done, cursor, count, clock)


def speed_table(sizes: tuple[tuple[int, int], ...] = ((4, 16), (8, 64), (16, 64), (32, 128))) -> str:
    """Speeds as a table, one row a size."""
    lines = ["ranks × microbatches  actions  whole orders/s  moves judged/s  moves applied/s"]
    for p, m in sizes:
        speed = measure_speed(p, m)
        size = f"{p} × {m}"
        lines.append(
            f"{size:<20}  {speed.actions:7}  {speed.whole:14,.0f}  {speed.judged:14,.0f}"
            f"  {speed.applied:15,.0f}"
        )
    return "\n".join(lines) + "\n"
