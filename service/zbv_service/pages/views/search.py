"""The page of one search: its problem, its progress and its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from zbv_solver.export import quantities
from zbv_solver.export.report import script_json
from zbv_solver.frontiers import memory_fraction
from zbv_solver.problem.layer import Model
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.numeric import exceeds
from zbv_solver.problem.problem import Problem, Units

from zbv_service.documents.problems import Question
from zbv_service.pages.shell import Shell, render
from zbv_service.pages.views.layers import LayersTable, facts_of_layers, layers_table
from zbv_service.pages.views.words import counted, shape_of
from zbv_service.records.searches import FINISHED, SearchRecord

LISTED_RANKS = 16
"""The number of groups of ranks with too little memory that are listed."""
PLACEMENTS = {"v": "V, two stages per rank", "loop": "interleaved", "single": "one stage per rank"}


@dataclass(frozen=True)
class Shortage:
    """Ranks with too little memory, first to last: their limit, and the smallest one that a plan fits."""

    first: int
    last: int
    limit: str
    smallest: str


@dataclass(frozen=True)
class SearchView:
    """The content of the page, as texts.

    Attributes
    ----------
    seconds
        From the first start of the search until now or its end; None if it never started.
    queued_before
        The number of searches ahead of a queued one.
    method, details
        The method that found the best plan, and its parameters.
    optimal
        Whether the plan is proved to be optimal.
    shortages, hidden_shortages
        Groups of ranks whose memory limit no plan fits, and the number of groups that are not listed.
    fraction
        The smallest feasible limit as a fraction of 1F1B's memory, as text; empty if there is none.
    layers
        The model's layers, if the problem has any.
    every_cut
        Whether the search divides the layers, so that the bound holds for every cut.
    """

    record: SearchRecord
    title: str
    subtitle: str
    is_open: bool
    seconds: float | None
    queued_before: int | None
    unit: str
    best: str
    bound: str
    gap: str
    method: str
    details: str
    optimal: bool
    shortages: tuple[Shortage, ...]
    hidden_shortages: int
    fraction: str
    facts: tuple[tuple[str, str], ...]
    layers: LayersTable | None
    every_cut: bool


def search_view(
    record: SearchRecord, problem: Question, queued_before: int | None, now: datetime | None = None
) -> SearchView:
    """The content of the page of a search."""
    units, value, bound = problem.units, record.objective, record.lower_bound
    shortages = _shortages(record, problem) if record.state == "infeasible" else []
    method, _, details = (record.method or "").partition("(")
    model = _model_of(problem)
    return SearchView(
        record=record,
        title=shape_of(problem),
        subtitle=_subtitle(problem),
        is_open=record.state not in FINISHED,
        seconds=_seconds(record, now or datetime.now(UTC)),
        queued_before=queued_before,
        unit=quantities.time_unit(units),
        best="–" if value is None else quantities.time(value, units),
        bound="–" if bound is None else quantities.time(bound, units),
        gap="–" if record.gap is None else quantities.percent(record.gap),
        method=method or "–",
        details=details.removesuffix(")"),
        optimal=record.plan_id is not None and record.gap == 0,
        shortages=tuple(shortages[:LISTED_RANKS]),
        hidden_shortages=max(0, len(shortages) - LISTED_RANKS),
        fraction=_smallest(problem) if shortages and isinstance(problem, Problem) else "",
        facts=tuple(_facts(record, problem)),
        layers=None if model is None else layers_table(model, units),
        every_cut=isinstance(problem, LayeredProblem),
    )


def search_page(view: SearchView, shell: Shell) -> str:
    """The page. A script draws the progress; without it the page shows the current numbers."""
    record = view.record
    data = {
        "id": record.id,
        "state": record.state,
        "seconds": view.seconds,
        "unit": view.unit,
        "title": view.title,
        "address": f"{shell.root}/v1/searches/{record.id}",
        "list": f"{shell.root}/searches",
    }
    values = {"view": view, "row": record, "may_search": shell.may_search, "data": script_json(data)}
    return render("search.html.j2", shell, **values)


def _seconds(record: SearchRecord, now: datetime) -> float | None:
    if record.started_at is None:
        return None
    until = record.finished_at or now
    return round(max(0.0, (until - record.started_at).total_seconds()), 3)


def _model_of(problem: Question) -> Model | None:
    if isinstance(problem, LayeredProblem):
        return problem.model
    return None if problem.model is None else problem.model.model


def _subtitle(problem: Question) -> str:
    aim = f"minimise the {problem.objective}"
    if isinstance(problem, LayeredProblem):
        return f"divide {counted(problem.model.n_layers, 'layer')} into stages; {aim}"
    return aim


def _shortages(record: SearchRecord, problem: Question) -> list[Shortage]:
    if isinstance(problem, Problem):
        return _lacking(problem.memory.limit or (), problem.smallest_limit, problem.units)
    # The search has found what the best cut needs.
    smallest = (record.error or {}).get("smallest_limit", [])
    return _lacking((problem.limit or ())[: len(smallest)], smallest, problem.units)


def _lacking(limits: Sequence[float], smallest: Sequence[float], units: Units) -> list[Shortage]:
    found: list[Shortage] = []
    for rank, (limit, least) in enumerate(zip(limits, smallest, strict=True)):
        if exceeds(least, limit):
            texts = quantities.memory(limit, units), quantities.memory(least, units)
            before = found[-1] if found else None
            if before is not None and (before.last, before.limit, before.smallest) == (rank - 1, *texts):
                found[-1] = Shortage(before.first, rank, *texts)
            else:
                found.append(Shortage(rank, rank, *texts))
    return found


def _facts(record: SearchRecord, problem: Question) -> list[tuple[str, str]]:
    if isinstance(problem, LayeredProblem):
        return facts_of_layers(problem) + _asked(record.options, record)
    costs, memory, unit = problem.costs, problem.memory, quantities.time_unit(problem.units)
    facts = [
        ("Placement", PLACEMENTS[problem.placement.kind]),
        ("Forward F", _spread(costs.forward, unit)),
        ("Backward, input I", _spread(costs.backward_input, unit)),
        ("Backward, weight W", _spread(costs.backward_weight, unit)),
        ("Full backward B", "I + W" if costs.backward is None else _spread(costs.backward, unit)),
        ("Transfer", _spread(costs.p2p, unit) if costs.p2p else "none"),
        ("Memory limit", _limit(problem)),
    ]
    if any(memory.forward):
        low, high = min(memory.forward), max(memory.forward)
        text = quantities.memory(low, problem.units)
        facts.append(
            (
                "Forward holds",
                text if low == high else f"{text} to {quantities.memory(high, problem.units)}",
            )
        )
    return facts + _asked(record.options, record)


def _asked(options: Mapping[str, Any], record: SearchRecord) -> list[tuple[str, str]]:
    limit, seed = options.get("time_limit"), options.get("seed", 0)
    effort = str(options.get("effort", "standard"))
    if limit is not None:
        effort += f", at most {quantities.figure(limit)} s"
    facts = [("Effort", f"{effort}, seed {seed}" if seed else effort)]
    if record.created_by is not None:
        facts.append(("Submitted by", record.created_by))
    return facts


def _limit(problem: Problem) -> str:
    limits = problem.memory.limit
    if limits is None:
        return "none"
    low, high = min(limits), max(limits)
    text = quantities.memory(low, problem.units)
    if low != high:
        text += f" to {quantities.memory(high, problem.units)}"
    if memory_fraction.one_f_one_b_memory(problem) == 0:
        return text
    return f"{text}, {_fraction(memory_fraction.of_limit(problem) or 0.0)} 1F1B"


def _smallest(problem: Problem) -> str:
    if memory_fraction.one_f_one_b_memory(problem) == 0:
        return ""
    return f"{quantities.figure(memory_fraction.smallest(problem))} ×"


def _fraction(value: float) -> str:
    return f"{quantities.figure(value, 3)} ×"


def _spread(values: Sequence[float], unit: str) -> str:
    low, high = quantities.figure(min(values)), quantities.figure(max(values))
    return " ".join(filter(None, [low if low == high else f"{low} to {high}", unit]))
