"""``/runs/{run_id}`` and ``/runs/{run_id}/measured``: one run, and its measurements against its plan."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any
from urllib.parse import parse_qs, quote

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse
from zbv_solver.export import quantities
from zbv_solver.export.report.figures import Card
from zbv_solver.measure.refit import NANOSECONDS

from zbv_service.api.bodies import read_form
from zbv_service.api.negotiation import root_of
from zbv_service.api.state import state_of
from zbv_service.compute.computations import ROWS_OF_NODE
from zbv_service.documents.parsing import parse_body
from zbv_service.pages.run_charts import LossChart, StepChart, duration, loss_chart, step_chart
from zbv_service.pages.shell import page
from zbv_service.pages.words import reached_step
from zbv_service.records.runs import RUN_ENDED, PartInfo, RunRecord, place_of
from zbv_service.records.searches import PlanFilter, PlanSummary
from zbv_service.runs.documents import PlanChange
from zbv_service.runs.options import OF_SCRIPTS
from zbv_service.runs.steps import StepLine
from zbv_service.security.scheme import READ, needs

MAX_FORM_BYTES = 1024
EVENTS = 200
"""The newest events on a page."""
MAX_INDEX = 2**31 - 1

Index = Annotated[int | None, Query(ge=0, le=MAX_INDEX)]
LAUNCH = needs("launch")

router = APIRouter(include_in_schema=False)


@router.get("/runs/{run_id}", dependencies=[READ])
async def get_run_page(request: Request, run_id: str, ranks: Index = None) -> Response:
    """The page of a run, with some of its ranks, from ``ranks`` on."""
    found = state_of(request)
    async with found.computations.listing(ROWS_OF_NODE * (await found.runs.brief(run_id)).nodes):
        run = await found.runs.get(run_id)
        index = await found.parts.index(run_id)
        lines = await found.steps.newest(run_id, index)
    events = await found.runs.newest_events(run_id, EVENTS)
    plan = None
    if run.plan_id is not None:
        plans = (await found.plans.page(PlanFilter(text=run.plan_id), 1, None)).items
        plan = plans[0] if plans else None
    view = await found.computations.write(run_view, run, plan, index, lines, ranks)
    return await page(request, "run.html.j2", view=view, run=run, events=events)


@router.post("/runs/{run_id}/cancel", dependencies=[LAUNCH])
async def post_cancel(request: Request, run_id: str) -> Response:
    """Stop a run on all of its nodes."""
    await state_of(request).runs.cancel(run_id)
    return _to_run(request, run_id)


@router.post("/runs/{run_id}/plan", dependencies=[LAUNCH])
async def post_plan(request: Request, run_id: str) -> Response:
    """Switch a run to another plan."""
    form = parse_qs(await read_form(request, MAX_FORM_BYTES))
    change = parse_body(PlanChange, {"plan_id": form.get("plan_id", [""])[0]})
    await state_of(request).runs.change_plan(run_id, change.plan_id)
    return _to_run(request, run_id)


def _to_run(request: Request, run_id: str) -> Response:
    return RedirectResponse(f"{root_of(request)}/runs/{quote(run_id)}", 303)


SHOWN_RANKS = 256
"""Ranks on a page, which reloads itself every few seconds."""


@dataclass(frozen=True)
class RankRow:
    """The state of a rank; ``log`` and ``trace`` are the newest generations that have one."""

    rank: int
    agent: str
    node: int
    state: str
    step: int | None
    action: str
    log: int | None
    trace: int | None


@dataclass(frozen=True)
class Failure:
    """Why a rank failed; for earlier generations also which one and when."""

    kind: str
    rank: int | None
    agent: str
    where: str
    detail: str
    generation: int | None = None
    at: datetime | None = None


@dataclass(frozen=True)
class RunView:
    """The content of the page."""

    is_open: bool
    step: int | None
    """The step that all ranks have reached."""
    share: float | None
    """The completed share of the steps, from 0 to 1; None for a script, whose number of steps is unknown."""
    facts: tuple[Card, ...]
    steps: StepChart | None
    losses: LossChart | None
    ranks: tuple[RankRow, ...]
    """At most :data:`SHOWN_RANKS` of them."""
    rank_count: int
    are_ranks_open: bool
    """Whether the reader asked for some ranks, and so wants to see them."""
    earlier_ranks: int | None
    """The first rank of the page of ranks before this one; None on the first page."""
    later_ranks: int | None
    gain: str
    """The gain of the plan that is better with the measured costs; empty if there is none."""
    failures: tuple[Failure, ...]
    earlier: tuple[Failure, ...]
    """Failures before the last one."""
    generations: tuple[int, ...]
    has_traces: bool
    options: tuple[tuple[str, str], ...]
    """Options of the run, as terms and values."""


def run_view(
    run: RunRecord,
    plan: PlanSummary | None,
    index: Sequence[PartInfo],
    lines: Sequence[StepLine],
    first_rank: int | None = None,
) -> RunView:
    """A run, ready for the template.

    Parameters
    ----------
    plan
        The plan of the run; None while a search is looking for it.
    index
        The logs and traces that ranks have sent.
    lines
        The newest measured steps, ascending.
    first_rank
        Where the page's ranks begin; None if nobody asked for some of them.
    """
    step, planned = reached_step(run), _seconds(plan)
    count, first = run.nodes * run.ranks_per_node, first_rank or 0
    later = first + SHOWN_RANKS
    return RunView(
        is_open=run.state not in RUN_ENDED,
        step=step,
        share=_share(run, step),
        facts=tuple(_facts(run, plan, planned, lines, step)),
        steps=step_chart(lines, planned) if lines else None,
        losses=loss_chart(lines),
        ranks=tuple(_ranks(run, index, range(first, min(later, count)))),
        rank_count=count,
        are_ranks_open=first_rank is not None,
        earlier_ranks=max(0, first - SHOWN_RANKS) if first else None,
        later_ranks=later if later < count else None,
        gain=_gain(run),
        failures=tuple(map(_failure, (run.error or {}).get("failures") or ())),
        earlier=tuple(map(_failure, _earlier(run))),
        generations=tuple(sorted({part.generation for part in index})),
        has_traces=any(part.kind == "trace" for part in index),
        options=tuple(_options(run)),
    )


def _share(run: RunRecord, step: int | None) -> float | None:
    if run.steps is None:
        return None
    if run.state == "succeeded":
        return 1.0
    return 0.0 if step is None else min(1.0, step / run.steps)


def _seconds(plan: PlanSummary | None) -> float | None:
    """The planned time of a step; None if the plan has no time unit."""
    unit = None if plan is None else NANOSECONDS.get(plan.time_unit or "")
    return None if plan is None or unit is None else plan.value * unit / 1e9


def _facts(
    run: RunRecord,
    plan: PlanSummary | None,
    planned: float | None,
    lines: Sequence[StepLine],
    step: int | None,
) -> Iterator[Card]:
    done = run.steps if run.state == "succeeded" and run.steps is not None else step
    total = "" if run.steps is None else f"of {quantities.figure(run.steps, 12)}"
    yield Card("Step", "–" if done is None else quantities.figure(done, 12), total)
    if lines:
        middle = sorted(line.seconds for line in lines)[(len(lines) - 1) // 2]
        note = "median of the latest steps"
        if planned:
            note = f"planned {duration(planned)}, {quantities.relative(middle, planned)}"
        yield Card("Step time", duration(middle), note)
    elif planned:
        yield Card("Step time", "–", f"planned {duration(planned)}")
    for line in reversed(lines):
        if line.loss is not None:
            yield Card("Loss", quantities.figure(line.loss), f"of step {line.step}")
            break
    nodes = f"on {quantities.counted(run.nodes, 'node')}"
    replicas = int(run.options.get("data_parallel", 1))
    ranks = str(run.nodes * run.ranks_per_node)
    yield Card("Ranks", ranks, nodes if replicas == 1 else f"{replicas} replicas {nodes}")
    restarts = f"restarted {quantities.counted(run.generation, 'time')}"
    yield Card("Generation", str(run.generation), restarts if run.generation else "never restarted")
    if plan is not None:
        yield Card("Planned bubble", quantities.percent(plan.bubble_rate), "idle share of a span")


def _ranks(run: RunRecord, index: Sequence[PartInfo], ranks: range) -> Iterator[RankRow]:
    """These ranks of the current generation, with their newest logs and traces."""
    newest: dict[tuple[str, int], int] = {}
    for part in index:
        key = (part.kind, part.rank)
        newest[key] = max(part.generation, newest.get(key, part.generation))
    nodes = {node.node_rank: node for node in run.members}
    places = {int(place["rank"]): place for node in run.members for place in node.ranks}
    for rank in ranks:
        node = nodes.get(rank // run.ranks_per_node)
        place: dict[str, Any] = places.get(rank, {})
        yield RankRow(
            rank=rank,
            agent="" if node is None else node.agent_name,
            node=rank // run.ranks_per_node,
            state="waiting" if node is None else str(node.outcome or node.state),
            step=place.get("step"),
            action=str(place.get("action") or ""),
            log=newest.get(("log", rank)),
            trace=newest.get(("trace", rank)),
        )


def _gain(run: RunRecord) -> str:
    if run.offer is None:
        return ""
    return quantities.percent(1 - run.offer["objective_then"] / run.offer["objective_now"], 1)


def _earlier(run: RunRecord) -> Sequence[dict[str, Any]]:
    """The causes of failures before the last one."""
    last = run.generation if run.error is not None else None
    return [cause for cause in run.failures if cause["generation"] != last]


def _failure(failure: Mapping[str, Any]) -> Failure:
    at = failure.get("at")
    return Failure(
        kind=str(failure["kind"]),
        rank=failure.get("rank"),
        agent=str(failure.get("agent") or ""),
        where=place_of({**failure, "rank": None}),
        detail=str(failure["detail"] if "detail" in failure else failure["message"]),
        generation=failure.get("generation"),
        at=None if at is None else datetime.fromisoformat(at),
    )


def _options(run: RunRecord) -> Iterator[tuple[str, str]]:
    yield "Model" if run.script is None else "Script", run.program
    if run.script is not None and run.script["arguments"]:
        yield "Arguments", shlex.join(run.script["arguments"])[:1000]
    for name, value in (run.model or {}).get("arguments", {}).items():
        yield f"Argument {name}", _text(value)
    yield "Submitted by", run.created_by or "–"
    for name, value in run.options.items():
        if run.script is not None and name not in OF_SCRIPTS:
            continue
        if value is not None and not isinstance(value, dict):
            yield name.replace("_", " ").capitalize(), _text(value)
    checkpoint = run.options.get("checkpoint")
    if checkpoint:
        yield "Checkpoints", f"every {checkpoint['every']} steps, in {checkpoint['directory']}"


def _text(value: Any) -> str:
    """A JSON value as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)[:200]
