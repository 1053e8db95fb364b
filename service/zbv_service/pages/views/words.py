"""Phrases that several pages share."""

from __future__ import annotations

from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.problem import Problem


def counted(count: int, word: str) -> str:
    """A count with its noun: ``1 rank``, ``4 microbatches``."""
    plural = f"{word}es" if word.endswith("ch") else f"{word}s"
    return f"{count} {word if count == 1 else plural}"


def shape_of(problem: Problem | LayeredProblem) -> str:
    """The size of a problem: ``4 ranks × 16 microbatches``."""
    return f"{counted(problem.pp_degree, 'rank')} × {counted(problem.microbatches, 'microbatch')}"


def placement_name(kind: str, chunks: int) -> str:
    """The name of a placement: ``V``, ``interleaved × 3``."""
    return {"v": "V", "single": "one stage per rank"}.get(kind, f"interleaved × {chunks}")
