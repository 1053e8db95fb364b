"""``/searches/{search_id}``: one search: its problem, its progress and its result."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from zbv_solver.export import quantities
from zbv_solver.export.report.figures import cost_facts, cost_values
from zbv_solver.export.report.sections import deviations
from zbv_solver.frontiers import memory_fraction
from zbv_solver.problem.jitter import parse_jitter
from zbv_solver.problem.layer import Model
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.numeric import exceeds
from zbv_solver.problem.problem import Problem

from zbv_service.api.state import state_of
from zbv_service.documents.problems import Question, unpack
from zbv_service.pages.shell import page
from zbv_service.pages.words import facts_of_layers, shape_of
from zbv_service.records.searches import FINISHED, SearchDocument
from zbv_service.searches.searches import parse_packed
from zbv_service.security.access import READ

router = APIRouter(include_in_schema=False)


@router.get("/searches/{search_id}", dependencies=[READ])
async def get_search_page(request: Request, search_id: str) -> HTMLResponse:
    """The page of a search."""
    found = state_of(request)
    record, packed = await found.searches.asked(search_id, SearchDocument)
    values = await found.computations.run(partial(_values, record), packed)
    return await page(request, "search.html.j2", row=record, **values)


def _values(record: SearchDocument, packed: bytes) -> dict[str, Any]:
    return search_values(record, parse_packed(packed))


PLACEMENTS = {"v": "V, two stages per rank", "loop": "interleaved", "single": "one stage per rank"}


@dataclass(frozen=True)
class Shortage:
    """Ranks with too little memory, first to last: their limit, and the smallest one that a plan fits."""

    first: int
    last: int
    limit: str
    smallest: str


def search_values(record: SearchDocument, problem: Question, now: datetime | None = None) -> dict[str, Any]:
    """What the template shows of a search's problem."""
    shortages = _shortages(record, problem) if record.state == "infeasible" else []
    model: Model | None
    if isinstance(problem, LayeredProblem):
        model, facts = problem.model, facts_of_layers(problem)
    else:
        model, facts = None if problem.model is None else problem.model.model, _facts(problem)
    method, _, details = (record.method or "").partition("(")
    return {
        "title": shape_of(problem),
        "subtitle": _subtitle(problem),
        "is_open": record.state not in FINISHED,
        "seconds": _seconds(record, now or datetime.now(UTC)),
        "method": method,
        "details": details.removesuffix(")"),
        "shortages": shortages,
        "fraction": _smallest_fraction(problem) if shortages and isinstance(problem, Problem) else "",
        "facts": [*facts, *_options(record)],
        "model": model,
        "units": problem.units,
        "every_cut": isinstance(problem, LayeredProblem),
    }


def _seconds(record: SearchDocument, now: datetime) -> float | None:
    if record.started_at is None:
        return None
    until = record.finished_at or now
    return round(max(0.0, (until - record.started_at).total_seconds()), 3)


def _subtitle(problem: Question) -> str:
    aim = f"minimise the {problem.objective}"
    if isinstance(problem, LayeredProblem):
        return f"divide {quantities.counted(problem.model.n_layers, 'layer')} into stages; {aim}"
    return aim


def _shortages(record: SearchDocument, problem: Question) -> list[Shortage]:
    """Neighbouring ranks with the same limit that is too small, together."""
    if isinstance(problem, Problem):
        limits, smallest = problem.memory.limit or (), problem.smallest_limit
    else:
        # The search has recorded what the closest cut would need.
        smallest = tuple((record.error or {}).get("smallest_limit", ()))
        limits = (problem.limit or ())[: len(smallest)]
    found: list[Shortage] = []
    for rank, (limit, least) in enumerate(zip(limits, smallest, strict=True)):
        if not exceeds(least, limit):
            continue
        texts = quantities.memory(limit, problem.units), quantities.memory(least, problem.units)
        before = found[-1] if found else None
        if before is not None and (before.last, before.limit, before.smallest) == (rank - 1, *texts):
            found[-1] = Shortage(before.first, rank, *texts)
        else:
            found.append(Shortage(rank, rank, *texts))
    return found


def _facts(problem: Problem) -> list[tuple[str, str]]:
    """The problem as terms and values."""
    facts = [
        ("Placement", PLACEMENTS[problem.placement.kind]),
        *cost_facts(problem),
        ("Memory limit", _limit(problem)),
    ]
    held = cost_values(problem)["memory forward"]
    if held is not None and any(held):
        facts.append(("Forward holds", quantities.memories(held, problem.units)))
    return facts


def _options(record: SearchDocument) -> list[tuple[str, str]]:
    limit, seed = record.options.time_limit, record.options.seed
    effort: str = record.options.effort
    if limit is not None:
        effort += f", at most {quantities.figure(limit)} s"
    facts = [("Effort", f"{effort}, seed {seed}" if seed else effort)]
    quantile = record.options.quantile
    if record.jitter is not None:
        time = "mean" if quantile is None else f"{quantities.figure(quantile)} quantile of the"
        varies = deviations(parse_jitter(unpack(record.jitter)))
        facts.append(("Chosen for", f"{time} simulated time; {varies}"))
    if record.created_by is not None:
        facts.append(("Submitted by", record.created_by))
    return facts


def _limit(problem: Problem) -> str:
    """The limit, as amounts and as a fraction of 1F1B's memory."""
    text = quantities.memories(problem.memory.limit, problem.units)
    if problem.memory.limit is None or memory_fraction.one_f_one_b_memory(problem) == 0:
        return text
    return f"{text}, {quantities.figure(memory_fraction.of_limit(problem) or 0.0, 3)} × 1F1B"


def _smallest_fraction(problem: Problem) -> str:
    if memory_fraction.one_f_one_b_memory(problem) == 0:
        return ""
    return f"{quantities.figure(memory_fraction.smallest(problem))} ×"
