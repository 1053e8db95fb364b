"""Memory limits as fractions of the memory of 1F1B, the usual measure for comparing schedules.

1.0 is the activation memory of 1F1B on the same model: the largest amount that any rank holds at once. Under
1F1B, rank r has the forwards of p - r microbatches in flight (at most m), on the stages that are merged into
its only stage. With equal stages this is p times the activations of a microbatch, on rank 0. Static memory is
added and never scaled: the limit at a fraction f is ``static + f * one_f_one_b_memory`` on every rank.

If microbatches differ, the peak of 1F1B depends on their order. 1.0 is then its peak for equal microbatches
that hold the mean, which no order changes; but at least what the largest microbatch holds on a rank, so that
some plan fits at 1.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import sub

from zbv_solver.errors import InvalidInput
from zbv_solver.problem.problem import F, Problem


def one_f_one_b_memory(problem: Problem) -> float:
    """Activation memory of 1F1B on the rank that holds most, in the problem's memory unit.

    Its backwards are fused and never allocate, so the peak is that of the forwards in flight.
    """
    if not problem.is_equal:
        largest: list[float] = [*map(sub, problem.smallest_limit, problem.memory.static)]
        return max(one_f_one_b_memory(problem.averaged()), *largest)
    p, m, chunks = problem.pp_degree, problem.microbatches, problem.placement.chunks
    forward: Sequence[float] = problem.memory.forward
    if problem.features:
        forward = problem.arrays.delta[F, :, 0].tolist()
    # 1F1B merges neighbouring stages in model order on every placement (construct.baselines).
    held = (sum(forward[rank * chunks : (rank + 1) * chunks]) for rank in range(p))
    return max(min(p - rank, m) * amount for rank, amount in enumerate(held))


def limits(problem: Problem, fraction: float) -> tuple[float, ...]:
    """The limits (p,) at a fraction of 1F1B's memory, static memory included."""
    activations = fraction * one_f_one_b_memory(problem)
    return tuple(static + activations for static in problem.memory.static)


def at_fraction(problem: Problem, fraction: float) -> Problem:
    """The problem with the limit of a fraction."""
    return replace(problem, memory=replace(problem.memory, limit=limits(problem, fraction)))


def needed(problem: Problem, memory: Sequence[float]) -> float:
    """The smallest fraction with limits that hold a memory use per rank (p,), static memory included.

    Raises
    ------
    InvalidInput
        When no stage holds memory.
    """
    return max(_fractions(problem, memory))


def of_limit(problem: Problem) -> float | None:
    """The problem's limit as a fraction, on the tightest rank; None without a limit.

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
            "no stage holds memory, so limits have no fractions. Give memory.forward, "
            "memory.backward_input and memory.backward_weight.",
        )
    return [(held - static) / whole for held, static in zip(memory, problem.memory.static, strict=True)]
