"""Memory limits as a fraction of what 1F1B needs, the measure in which people compare schedules.

1.0 is the memory that 1F1B's activations take on the same model: the largest amount that any rank holds at
once. Under 1F1B rank r has the forwards of p - r microbatches in flight (or of all m where there are fewer),
each on the stages that are merged into its one stage; in a model of equal stages that is p times a
microbatch's bytes on rank 0. Static memory comes on top and is never scaled: a limit at a fraction f is
``static + f * one_f_one_b_memory`` on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zbv_solver.errors import InvalidInput
from zbv_solver.problem.problem import Problem


def one_f_one_b_memory(problem: Problem) -> float:
    """What 1F1B's activations take on the rank that holds most, in the problem's memory unit.

    Its backward is fused and so never allocates; the peak is that of the forwards in flight.
    """
    p, m, chunks = problem.pp_degree, problem.microbatches, problem.placement.chunks
    forward = problem.memory.forward
    # Its stages are neighbours merged in model order, whatever the placement (construct.baselines).
    held = (sum(forward[rank * chunks : (rank + 1) * chunks]) for rank in range(p))
    return max(min(p - rank, m) * amount for rank, amount in enumerate(held))


def limits(problem: Problem, fraction: float) -> tuple[float, ...]:
    """The limit of every rank, (p,), that is ``fraction`` of 1F1B's memory; static use comes on top."""
    activations = fraction * one_f_one_b_memory(problem)
    return tuple(static + activations for static in problem.memory.static)


def at_fraction(problem: Problem, fraction: float) -> Problem:
    """The problem with that limit, whatever its own is."""
    return replace(problem, memory=replace(problem.memory, limit=limits(problem, fraction)))


def needed(problem: Problem, memory: Sequence[float]) -> float:
    """The fraction that a use of memory per rank, (p,), static included, amounts to: the largest rank's.

    Raises
    ------
    InvalidInput
        When no stage holds memory.
    """
    return max(_fractions(problem, memory))


def of_limit(problem: Problem) -> float | None:
    """The problem's limit as a fraction, that of the tightest rank; None where there is no limit.

    Raises
    ------
    InvalidInput
        When no stage holds memory.
    """
    limit = problem.memory.limit
    return None if limit is None else min(_fractions(problem, limit))


def smallest(problem: Problem) -> float:
    """The smallest fraction at which some plan fits (see :attr:`Problem.smallest_limit`).

    Raises
    ------
    InvalidInput
        When no stage holds memory.
    """
    return needed(problem, problem.smallest_limit)


def _fractions(problem: Problem, memory: Sequence[float]) -> list[float]:
    whole = one_f_one_b_memory(problem)
    if whole == 0:
        raise InvalidInput.at(
            "/memory",
            "the stages hold no memory, so there is no fraction of it. Give memory.forward, "
            "memory.backward_input and memory.backward_weight.",
        )
    return [(held - static) / whole for held, static in zip(memory, problem.memory.static, strict=True)]
