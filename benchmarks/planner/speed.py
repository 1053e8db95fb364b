"""Speed of the kernels in which the search spends its time."""

from __future__ import annotations

import time
from dataclasses import dataclass

from zbv_solver.construct.greedy_v import get_v_schedule
from zbv_solver.construct.list_scheduling import ListScheduler
from zbv_solver.construct.rules import simple_rule
from zbv_solver.improve.annealing import anneal
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_problem

REPEATS = 5


@dataclass(frozen=True)
class Speed:
    """Orders and moves per second on one core."""

    pp_degree: int
    microbatches: int
    actions: int
    constructed: float
    """Complete orders that list scheduling constructs and times."""
    judged: float
    """Moves that annealing evaluates by heads and tails."""
    applied: float
    """Moves that it applies at the same time, including the update of times, memory and critical path."""


def measure_speed(p: int, m: int, seconds: float = 1.0) -> Speed:
    """Measure p ranks and m microbatches: the best of a few repetitions, about ``seconds`` in total."""
    problem = _problem(p, m)
    start = next(get_v_schedule(problem)).orders
    anneal(problem, start, moves=10, temperature=1.0, seed=0)  # loads the kernels
    rounds = max(1, int(seconds / REPEATS / 1e-7 / problem.max_actions))
    constructed = max(_constructed_per_second(problem, rounds) for _ in range(REPEATS))
    judged = applied = 0.0
    for seed in range(REPEATS):
        began = time.perf_counter()
        made = anneal(problem, start, moves=max(10, 2 * rounds), temperature=0.01, seed=seed)
        seconds_used = time.perf_counter() - began
        judged = max(judged, made.looked / seconds_used)
        applied = max(applied, made.moves / seconds_used)
    return Speed(p, m, problem.max_actions, constructed, judged, applied)


def _problem(p: int, m: int) -> Problem:
    """Uneven stages in the memory of 1F1B."""
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


def _constructed_per_second(problem: Problem, rounds: int) -> float:
    scheduler, rule = ListScheduler(problem), simple_rule(problem, "backward-deep", 1.0, 0.5)
    scheduler.value(rule)  # loads the kernel
    began = time.perf_counter()
    for _ in range(rounds):
        scheduler.value(rule)
    return rounds / (time.perf_counter() - began)


def speed_table(sizes: tuple[tuple[int, int], ...] = ((4, 16), (8, 64), (16, 64), (32, 128))) -> str:
    """Return a table with one row per size."""
    lines = ["ranks × microbatches  actions  orders made/s  moves judged/s  moves applied/s"]
    for p, m in sizes:
        speed = measure_speed(p, m)
        size = f"{p} × {m}"
        lines.append(
            f"{size:<20}  {speed.actions:7}  {speed.constructed:13,.0f}  {speed.judged:14,.0f}"
            f"  {speed.applied:15,.0f}"
        )
    return "\n".join(lines) + "\n"
