"""Phrases that several pages share; the templates use some of them as filters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

from zbv_solver.export.quantities import counted
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.problem import Problem

from zbv_service.plans.renderings import PlanFacts
from zbv_service.records.runs import RunDocument


def shape_of(problem: Problem | LayeredProblem | PlanFacts) -> str:
    """The size of a problem: ``4 ranks × 16 microbatches``."""
    return f"{counted(problem.pp_degree, 'rank')} × {counted(problem.microbatches, 'microbatch')}"


def placement_name(kind: str, chunks: int) -> str:
    """The name of a placement: ``V``, ``interleaved × 3``."""
    return {"v": "V", "single": "one stage per rank"}.get(kind, f"interleaved × {chunks}")


def moment(at: datetime) -> str:
    """A time in UTC, to the minute; naive times are in UTC already."""
    return (at if at.tzinfo is None else at.astimezone(UTC)).strftime("%Y-%m-%d %H:%M")


def ago(at: datetime) -> str:
    """How long ago a time was, in one unit: ``12 s ago``."""
    seconds = (datetime.now(UTC) - at).total_seconds()
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"


def grouped(names: Sequence[str]) -> str:
    """Names in order of their first occurrence, with counts: ``8 × NVIDIA H200, CPU``."""
    return ", ".join(name if n == 1 else f"{n} × {name}" for name, n in Counter(names).items())


def reached_step(run: RunDocument) -> int | None:
    """The step that every rank of a run has reached, counted from 0; None before all have reported one."""
    steps = [place.get("step") for node in run.members for place in node.ranks]
    known = [step for step in steps if step is not None]
    return min(known) if known and len(known) == len(steps) else None
