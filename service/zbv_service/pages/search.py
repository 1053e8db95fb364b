"""``/searches/{search_id}``: one search: its problem, its progress and its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from zbv_solver.export import quantities
from zbv_solver.export.report.figures import cost_facts, cost_values
from zbv_solver.export.report.sections import deviations
from zbv_solver.frontiers import memory_fraction
from zbv_solver.problem.jitter import parse_jitter
from zbv_solver.problem.layer import Model
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.numeric import exceeds
from zbv_solver.problem.problem import Problem, Units

from zbv_service.api.negotiation import root_of
from zbv_service.api.state import state_of
from zbv_service.database.events import KEPT_EVENTS
from zbv_service.documents.problems import Question, unpack
from zbv_service.pages.charts import Scale, stairs
from zbv_service.pages.shell import page
from zbv_service.pages.words import clock, facts_of_layers, shape_of
from zbv_service.records.searches import FINISHED, SearchDocument, SearchEventDocument
from zbv_service.searches.searches import parse_packed
from zbv_service.security.access import READ, needs

SEARCH = needs("search")

router = APIRouter(include_in_schema=False)


@router.get("/searches/{search_id}", dependencies=[READ])
async def get_search_page(request: Request, search_id: str) -> HTMLResponse:
    """The page of a search."""
    found = state_of(request)
    record, packed = await found.searches.asked(search_id, SearchDocument)
    async with found.computations.listing(KEPT_EVENTS):
        events = await found.events.since(search_id, 0)
    values = await found.computations.run(partial(_values, record, events), packed)
    return await page(request, "search.html.j2", row=record, **values)


@router.post("/searches/{search_id}/cancel", dependencies=[SEARCH])
async def post_cancel(request: Request, search_id: str) -> Response:
    """Stop a search; its best plan is kept."""
    await state_of(request).searches.cancel(search_id)
    return RedirectResponse(f"{root_of(request)}/searches/{quote(search_id)}", 303)


@router.post("/searches/{search_id}/delete", dependencies=[SEARCH])
async def post_delete(request: Request, search_id: str) -> Response:
    """Remove a search, and show the others."""
    await state_of(request).searches.discard(search_id)
    return RedirectResponse(f"{root_of(request)}/searches", 303)


def _values(record: SearchDocument, events: Sequence[SearchEventDocument], packed: bytes) -> dict[str, Any]:
    return search_values(record, parse_packed(packed), events)


PLACEMENTS = {"v": "V, two stages per rank", "loop": "interleaved", "single": "one stage per rank"}


@dataclass(frozen=True)
class Shortage:
    """Ranks with too little memory, first to last: their limit, and the smallest one that a plan fits."""

    first: int
    last: int
    limit: str
    smallest: str


_MOST_MOMENTS = 400
"""Moments that are shown of a search: a screen has about twice as many columns."""
_FAR = 6
"""A plan that is this many times farther from the bound than the best one is above the chart."""
_X_TICKS, _Y_TICKS = 8, 5


@dataclass(frozen=True)
class Moment:
    """What is known of a search from a time on, in seconds since its start."""

    seconds: float
    best: float
    bound: float
    gap: float | None
    method: str | None


def moments_of(events: Sequence[SearchEventDocument]) -> list[Moment]:
    """The moments at which a search found a better plan or bound; of those that are close, the last."""
    found: list[Moment] = []
    for event in events:
        if event.objective is None or event.lower_bound is None:
            continue
        last = found[-1] if found else None
        # The first plan may be older than this search, if an earlier one found it.
        seconds = max(event.seconds or 0.0, last.seconds if last else 0.0)
        if last is None or (last.best, last.bound) != (event.objective, event.lower_bound):
            found.append(Moment(seconds, event.objective, event.lower_bound, event.gap, event.method))
    if len(found) <= _MOST_MOMENTS:
        return found
    width = found[-1].seconds / (_MOST_MOMENTS - 1) or 1.0
    return [found[0], *{int(moment.seconds / width): moment for moment in found[1:]}.values()]


def course_chart(moments: Sequence[Moment], until: float, units: Units) -> dict[str, Any]:
    """The chart of a search: its best plan and its bound against time, up to ``until`` seconds."""
    low, high = min(moment.bound for moment in moments), max(moment.best for moment in moments)
    best, bound = moments[-1].best, moments[-1].bound
    top = min(high, best + _FAR * max(best - bound, 0.02 * abs(best)))
    room = 0.08 * (top - low) or 0.05 * abs(top) or 1.0
    x = Scale(0.0, max(until, moments[-1].seconds, 0.5))
    y = Scale(top + room, max(0.0, low - room))

    def place(value: float) -> float:
        return max(0.0, y(value))

    def lines(values: Sequence[float]) -> list[tuple[float, float, float, float]]:
        corners = [(moment.seconds, value) for moment, value in zip(moments, values, strict=True)]
        return [(x(one), place(a), x(other), place(b)) for one, a, other, b in stairs(corners, x.last)]

    ends = [*(moment.seconds for moment in moments[1:]), x.last]
    return {
        "summary": f"Best plan and lower bound during {clock(x.last)}; the table below has the numbers.",
        "x_ticks": [(x(at), clock(at) if at else "0 s") for at in quantities.ticks(0.0, x.last, _X_TICKS)],
        "y_ticks": y.ticks(_Y_TICKS, quantities.timer(best, units)),
        "best": lines([moment.best for moment in moments]),
        "bound": lines([moment.bound for moment in moments]),
        "gaps": [
            {
                "x": x(moment.seconds),
                "width": round(x(end) - x(moment.seconds), 3),
                "y": place(moment.best),
                "height": round(place(moment.bound) - place(moment.best), 3),
                "text": _told(moment, units),
            }
            for moment, end in zip(moments, ends, strict=True)
        ],
        "above": "" if high <= top else f"↑ first plan: {quantities.time(moments[0].best, units)}",
    }


def _told(moment: Moment, units: Units) -> str:
    gap = "" if moment.gap is None else f", gap {quantities.percent(moment.gap)}"
    values = [
        f"best {quantities.time(moment.best, units)}",
        f"lower bound {quantities.time(moment.bound, units)}",
    ]
    method = f", {moment.method}" if moment.method else ""
    return f"after {clock(moment.seconds)}: {', '.join(values)}{gap}{method}"


def search_values(
    record: SearchDocument,
    problem: Question,
    events: Sequence[SearchEventDocument] = (),
    now: datetime | None = None,
) -> dict[str, Any]:
    """What the template shows of a search, its problem and its events."""
    shortages = _shortages(record, problem) if record.state == "infeasible" else []
    model: Model | None
    if isinstance(problem, LayeredProblem):
        model, facts = problem.model, facts_of_layers(problem)
    else:
        model, facts = None if problem.model is None else problem.model.model, _facts(problem)
    method, _, details = (record.method or "").partition("(")
    seconds, moments = _seconds(record, now or datetime.now(UTC)), moments_of(events)
    return {
        "title": shape_of(problem),
        "subtitle": _subtitle(problem),
        "is_open": record.state not in FINISHED,
        "seconds": seconds,
        "moments": moments,
        "share": _share(record, seconds),
        "course": course_chart(moments, seconds or 0.0, problem.units) if moments else None,
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


def _share(record: SearchDocument, seconds: float | None) -> float | None:
    """How much of its time limit an open search has used; None if it has no limit."""
    limit = record.options.time_limit
    if limit is None or record.state in FINISHED:
        return None
    return min(1.0, (seconds or 0.0) / limit)


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
