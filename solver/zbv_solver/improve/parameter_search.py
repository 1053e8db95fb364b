"""Search over the parameters of list scheduling: priorities, in-flight caps per rank, patience for W's.

A rule decides a whole order, so a change of one parameter moves thousands of actions at once: where memory
is tight or stages are uneven this finds more than any local change of an order. Random rules first, then
hill climbing from the best, with sideways steps. Counted in placed actions, so it repeats itself on every
machine.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from zbv_solver.construct.board import Attempt, Instance, is_complete, make_instance
from zbv_solver.construct.greedy_v import fuse_options
from zbv_solver.construct.list_scheduling import Rule, in_flight_caps, schedule
from zbv_solver.problem import Problem

PATIENCE = (0.0, 0.25, 0.5, 1.0)
EXPLORATION = 1 / 3
"""Share of the evaluations that draw fresh rules."""
MOST_EVALUATIONS = 600


def parameter_search(problem: Problem, placements: int, seed: int = 0) -> Iterator[Attempt | None]:
    """Ever better attempts, and None after every evaluation without one (to let the caller poll).

    Parameters
    ----------
    placements
        How many actions may be placed in all; at most ``MOST_EVALUATIONS`` orders are made of them.
    """
    evaluations = min(MOST_EVALUATIONS, placements // problem.max_actions)
    random = np.random.default_rng(seed)
    options = [(name, make_instance(problem, fuse)) for name, fuse in fuse_options(problem)]
    caps = in_flight_caps(problem)
    best: tuple[float, Rule, int] | None = None
    for evaluation in range(evaluations):
        if best is None or evaluation < evaluations * EXPLORATION:
            rule, option = _fresh(random, problem, caps), int(random.integers(len(options)))
        else:
            rule, option = _neighbour(random, best[1]), best[2]
        name, instance = options[option]
        attempt = _evaluate(problem, instance, rule, f"parameters(fuse={name},evaluation={evaluation})")
        if attempt is None or (best is not None and attempt.value > best[0]):
            yield None
            continue
        is_better = best is None or attempt.value < best[0]
        best = attempt.value, rule, option
        yield attempt if is_better else None


def _evaluate(problem: Problem, instance: Instance, rule: Rule, method: str) -> Attempt | None:
    board = schedule(instance, rule)
    return Attempt.of(method, problem, board) if is_complete(board) else None


def _fresh(random: np.random.Generator, problem: Problem, caps: NDArray[np.int64]) -> Rule:
    """Any priorities; caps on a line from the first rank to the last, around what memory allows."""
    chunks = problem.placement.chunks
    priorities = random.permutation(2 * chunks).astype(np.float64).reshape(2, chunks)
    first, last = random.uniform(0.4, 1.2, size=2)
    line = np.linspace(first, last, problem.pp_degree) * caps.max()
    in_flight = np.maximum(1, np.round(line)).astype(np.int64)
    return Rule(priorities, in_flight, float(random.choice(PATIENCE)))


def _neighbour(random: np.random.Generator, rule: Rule) -> Rule:
    """One parameter changed; most often the caps of a run of neighbouring ranks by one."""
    kind, p = random.integers(4), len(rule.in_flight)
    if kind == 0:
        priorities = random.permutation(rule.rank_of_kind.size).astype(np.float64)
        return rule._replace(rank_of_kind=priorities.reshape(rule.rank_of_kind.shape))
    if kind == 1:
        return rule._replace(patience=float(random.choice(PATIENCE)))
    begin = int(random.integers(p))
    end = min(p, begin + int(random.integers(1, p + 1)))
    in_flight = rule.in_flight.copy()
    in_flight[begin:end] = np.maximum(1, in_flight[begin:end] + random.choice((-1, 1)))
    return rule._replace(in_flight=in_flight)
