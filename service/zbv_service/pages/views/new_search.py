"""The page on which a search is asked for: a form that its script keeps in step with a problem document."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from math import isclose
from pathlib import Path
from typing import Any

from zbv_solver.documents.text import numbers
from zbv_solver.export.report import script_json
from zbv_solver.frontiers import memory_fraction
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.limits import MAX_PP_DEGREE
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.writing import layered_json, problem_json
from zbv_solver.search.options import EFFORTS, Effort

from zbv_service.documents.problems import uncut
from zbv_service.pages.shell import Shell, render


@dataclass(frozen=True)
class Preset:
    """A problem to begin with; ``limit_fraction`` is its limit as a fraction of 1F1B's memory."""

    name: str
    title: str
    about: str
    problem: dict[str, Any]
    limit_fraction: float | None = None


@dataclass(frozen=True)
class Start:
    """What the form shows first.

    Attributes
    ----------
    problem, options
        Documents as ``/v1/searches`` takes them.
    limit_fraction
        The limit as a fraction of 1F1B's memory, in place of the problem's.
    note
        Where it comes from, or why that could not be shown.
    preset
        The name of the preset that it is.
    """

    problem: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    limit_fraction: float | None = None
    note: str = ""
    preset: str = ""


@cache
def presets() -> tuple[Preset, ...]:
    """The problems that the form offers, of ``presets.json``; the first is there from the beginning."""
    text = (Path(__file__).parent / "presets.json").read_text(encoding="utf-8")
    return tuple(Preset(**entry) for entry in json.loads(text))


def start_at(preset: Preset, note: str = "") -> Start:
    """The form as a preset has it."""
    return Start(preset.problem, {}, preset.limit_fraction, note, preset.name)


def start_from(
    problem: Problem, options: Mapping[str, Any], note: str, *, at_smallest_limit: bool = False
) -> Start:
    """The form as an earlier problem has it, perhaps with the smallest memory limit that some plan fits."""
    if problem.model is not None:
        return start_from_layers(uncut(problem), options, f"{note} Its layers are cut anew.")
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
    """The form as earlier layers have it, perhaps with another memory limit of every rank."""
    document = layered_json(problem if limit is None else replace(problem, limit=tuple(limit)))
    for name, values in document["memory"].items():
        if values is not None and len(set(values)) == 1:
            document["memory"][name] = values[0]
    return Start(document, dict(options), None, note)


def new_search_page(start: Start, shell: Shell, *, max_effort: Effort) -> str:
    """The form, and what it begins with."""
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
    """The limit as a fraction of 1F1B's memory, where it is a round one on every rank."""
    limit = problem.memory.limit
    if limit is None or memory_fraction.one_f_one_b_memory(problem) == 0:
        return None
    fraction = round(memory_fraction.of_limit(problem) or 0.0, 4)
    same = memory_fraction.limits(problem, fraction)
    are_equal = all(isclose(one, other, rel_tol=1e-9) for one, other in zip(limit, same, strict=True))
    return fraction if fraction > 0 and are_equal else None
