"""``/new``: the form for a new search."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from math import isclose
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from zbv_solver.documents.files import numbers
from zbv_solver.export.report import script_json
from zbv_solver.frontiers import memory_fraction
from zbv_solver.problem.layered_problem import LayeredProblem, uncut
from zbv_solver.problem.numeric import MAX_PP_DEGREE
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.writing import layered_json, problem_json
from zbv_solver.search.options import EFFORTS, Effort

from zbv_service.api.state import state_of
from zbv_service.documents.problems import asked_of
from zbv_service.errors import ApiError
from zbv_service.pages.shell import Shell, html, render, shell_of
from zbv_service.plans.renderings import plan_of
from zbv_service.records.searches import SearchDocument
from zbv_service.records.shared import MAX_NAME
from zbv_service.searches.searches import parse_packed
from zbv_service.security.access import READ

PLAN_ID = 64
"""Characters of a plan's id; a search's has half as many."""
_SMALLEST = " Its memory limit is the smallest that some plan fits; a little more leaves less idle time."

router = APIRouter(include_in_schema=False)


@router.get("/new", dependencies=[READ])
async def get_new_search_page(request: Request) -> HTMLResponse:
    """The form: empty, with a preset, or with the problem of a search or plan (``from``)."""
    asked = request.query_params
    shell, most = shell_of(request), state_of(request).settings.max_effort
    source, preset = asked.get("from", ""), asked.get("preset", "")
    try:
        if source:
            return html(await _earlier(request, source, at_smallest_limit=asked.get("limit") == "smallest"))
        named = {each.name: each for each in presets()}
        start = start_at(named.get(preset, presets()[0]))
    except ApiError as error:
        start = start_at(presets()[0], f"{error.detail} This is the form as it is without it.")
    return html(new_search_page(start, shell, max_effort=most))


async def _earlier(request: Request, source: str, *, at_smallest_limit: bool) -> bytes:
    """The page with the problem of the search or plan with an id; rendering large ones takes long."""
    found = state_of(request)
    write = partial(new_search_page, shell=shell_of(request), max_effort=found.settings.max_effort)
    if len(source) == PLAN_ID:
        return await found.plans.compute(partial(_of_plan, write, at_smallest_limit), source)
    record, packed = await found.searches.asked(source, SearchDocument)
    return await found.computations.run(partial(_of_search, write, at_smallest_limit, record), packed)


def _of_plan(write: Callable[[Start], bytes], at_smallest_limit: bool, packed: bytes) -> bytes:
    plan = plan_of(packed)
    note = f"This is the problem of plan {plan.plan_id[:12]}."
    if plan.cut is not None:
        # For layers, only a search that found no plan knows the smallest limit.
        return write(start_from_layers(asked_of(plan), {}, f"{note} Its layers are cut again."))
    return write(_start_from(plan.problem, {}, note, at_smallest_limit))


def _of_search(
    write: Callable[[Start], bytes], at_smallest_limit: bool, record: SearchDocument, packed: bytes
) -> bytes:
    problem, note = parse_packed(packed), f"This is the problem of search {record.id[:12]}."
    if isinstance(problem, Problem):
        return write(_start_from(problem, record.options.stored(), note, at_smallest_limit))
    needed = (record.error or {}).get("smallest_limit") if at_smallest_limit else None
    note += _SMALLEST if needed else ""
    return write(start_from_layers(problem, record.options.stored(), note, needed))


def _start_from(problem: Problem, options: Mapping[str, Any], note: str, at_smallest_limit: bool) -> Start:
    note += _SMALLEST if at_smallest_limit else ""
    return start_from(problem, options, note, at_smallest_limit=at_smallest_limit)


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
        longest_name=MAX_NAME,
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
