"""The page for a new search: a form that its script keeps in step with a problem document."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from math import isclose
from pathlib import Path
from typing import Any

from zbv_solver.documents.files import numbers
from zbv_solver.export.report import script_json
from zbv_solver.frontiers import memory_fraction
from zbv_solver.problem.layered_problem import LayeredProblem, uncut
from zbv_solver.problem.numeric import MAX_PP_DEGREE
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.writing import layered_json, problem_json
from zbv_solver.search.options import EFFORTS, Effort

from zbv_service.pages.shell import Shell, render


@dataclass(frozen=True)
class Preset:
    """A problem to start from; ``limit_fraction`` is its limit as a fraction of 1F1B's memory."""

    name: str
    title: str
    about: str
    problem: dict[str, Any]
    limit_fraction: float | None = None


@dataclass(frozen=True)
class Start:
    """The initial content of the form."""

    problem: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    """Documents in the format of ``/v1/searches``."""
    limit_fraction: float | None = None
    """The limit as a fraction of 1F1B's memory; replaces the problem's limit."""
    note: str = ""
    """Where the content comes from, or why it could not be loaded."""
    preset: str = ""
    """The name of the preset, if it is one."""


@cache
def presets() -> tuple[Preset, ...]:
    """The problems that the form offers (``presets.json``); the form starts with the first."""
    text = (Path(__file__).parent / "presets.json").read_text(encoding="utf-8")
    return tuple(Preset(**entry) for entry in json.loads(text))


def start_at(preset: Preset, note: str = "") -> Start:
    """The form with a preset."""
    return Start(preset.problem, {}, preset.limit_fraction, note, preset.name)


def start_from(
    problem: Problem, options: Mapping[str, Any], note: str, *, at_smallest_limit: bool = False
) -> Start:
    """The form with an earlier problem, on request with the smallest memory limit that a plan fits."""
    if problem.model is not None:
        return start_from_layers(uncut(problem), options, f"{note} The planner chooses its stages again.")
    document = problem_json(problem)
    if at_smallest_limit:
        limit = problem.smallest_limit
        problem = replace(problem, memory=replace(problem.memory, limit=limit))
        document["memory"]["limit"] = numbers(limit)
    fraction = _round_fraction(problem)
    if fraction is not None:
        document["memory"]["limit"] = None
    return Start(document, dict(options), fraction, note)


def start_from_layers(
    problem: LayeredProblem,
    options: Mapping[str, Any],
    note: str,
    limit: Sequence[float] | None = None,
) -> Start:
    """The form with earlier layers, on request with another memory limit for every rank."""
    document = layered_json(problem if limit is None else replace(problem, limit=tuple(limit)))
    for name, values in document["memory"].items():
        if values is not None and len(set(values)) == 1:
            document["memory"][name] = values[0]
    return Start(document, dict(options), None, note)


def new_search_page(start: Start, shell: Shell, *, max_effort: Effort) -> bytes:
    """The page with the form and its initial content."""
    data = {
        "start": asdict(start),
        "presets": {preset.name: asdict(start_at(preset)) for preset in presets()},
        "root": shell.root,
        "base": shell.base_url,
        "has_tokens": bool(shell.account),
        "largest_pp_degree": MAX_PP_DEGREE,
    }
    return render(
        "new_search.html.j2",
        shell,
        presets=presets(),
        note=start.note,
        efforts=EFFORTS[: EFFORTS.index(max_effort) + 1],
        data=script_json(data),
    )


def _round_fraction(problem: Problem) -> float | None:
    """The limit as a fraction of 1F1B's memory, if it is the same round one on every rank."""
    limit = problem.memory.limit
    if limit is None or memory_fraction.one_f_one_b_memory(problem) == 0:
        return None
    fraction = round(memory_fraction.of_limit(problem) or 0.0, 4)
    same = memory_fraction.limits(problem, fraction)
    are_equal = all(isclose(one, other, rel_tol=1e-9) for one, other in zip(limit, same, strict=True))
    return fraction if fraction > 0 and are_equal else None
