"""``/runs/{run_id}``: one run: its state, the time of its steps, its ranks and its events."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Annotated, Any
from urllib.parse import parse_qs, quote

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse
from zbv_solver.export import quantities
from zbv_solver.export.quantities import SECONDS
from zbv_solver.export.report.figures import Card
from zbv_solver.problem.problem import NANOSECONDS

from zbv_service.api.bodies import read_form
from zbv_service.api.negotiation import root_of
from zbv_service.api.state import state_of
from zbv_service.compute.computations import ROWS_OF_NODE
from zbv_service.documents.parsing import parse_body
from zbv_service.pages.charts import MOST_DRAWN, Scale, evenly, strips
from zbv_service.pages.shell import page
from zbv_service.pages.words import reached_step
from zbv_service.records.plans import PlanSummaryDocument
from zbv_service.records.run_options import OF_SCRIPTS
from zbv_service.records.runs import RUN_ENDED, PartInfo, RunDocument, StepDocument, place_of
from zbv_service.runs.requests import PlanChange
from zbv_service.security.access import READ, needs
from zbv_service.security.quotas import STORES
from zbv_service.security.tokens import grant_of

MAX_FORM_BYTES = 1024
EVENTS = 200
"""The newest events on a page."""
MAX_INDEX = 2**31 - 1

Index = Annotated[int | None, Query(ge=0, le=MAX_INDEX)]
LAUNCH = needs("launch")
AGAIN = {"name", "plan_id", "model", "script", "nodes", "steps", "options"}
"""What a run that starts again has of the earlier one."""
IN_SECONDS = ("timeout", "startup_timeout")
"""Options of a run."""

router = APIRouter(include_in_schema=False)


@router.get("/runs/{run_id}", dependencies=[READ])
async def get_run_page(request: Request, run_id: str, ranks: Index = None) -> Response:
    """The page of a run, with some of its ranks, from ``ranks`` on."""
    found = state_of(request)
    async with found.computations.listing(ROWS_OF_NODE * (await found.runs.brief(run_id)).nodes):
        run = await found.runs.get(run_id)
        index = await found.parts.index(run_id)
        steps = await found.steps.of(run_id, index)
    events = await found.runs.newest_events(run_id, EVENTS)
    plan = None if run.plan_id is None else await found.plans.summary(run.plan_id)
    values = await found.computations.write(run_values, run, plan, index, steps, ranks)
    return await page(request, "run.html.j2", run=run, events=events, **values)


@router.post("/runs/{run_id}/cancel", dependencies=[LAUNCH])
async def post_cancel(request: Request, run_id: str) -> Response:
    """Stop a run on all of its nodes."""
    await state_of(request).runs.cancel(run_id)
    return _to_run(request, run_id)


@router.post("/runs/{run_id}/again", dependencies=[LAUNCH, STORES["runs"]])
async def post_again(request: Request, run_id: str) -> Response:
    """Start a run like an earlier one, from its beginning, and show it."""
    found = state_of(request)
    run = await found.runs.get(run_id)
    body = run.model_dump_json(include=AGAIN, exclude_defaults=True, exclude_none=True).encode()
    return _to_run(request, (await found.runs.submit(body, grant_of(request))).id)


@router.post("/runs/{run_id}/plan", dependencies=[LAUNCH])
async def post_plan(request: Request, run_id: str) -> Response:
    """Switch a run to another plan."""
    form = parse_qs(await read_form(request, MAX_FORM_BYTES))
    change = parse_body(PlanChange, {"plan_id": form.get("plan_id", [""])[0]})
    await state_of(request).runs.change_plan(run_id, change.plan_id)
    return _to_run(request, run_id)


def _to_run(request: Request, run_id: str) -> Response:
    return RedirectResponse(f"{root_of(request)}/runs/{quote(run_id)}", 303)


_HEADROOM = 1.15
"""The top of the chart of times, as a multiple of the longest one."""
_TICKS = 5
_LATEST = 15
"""The newest steps, of whose times the page shows the median."""
SHOWN_RANKS = 256
"""Ranks on a page, which reloads itself every few seconds."""


def run_values(
    run: RunDocument,
    plan: PlanSummaryDocument | None,
    index: Sequence[PartInfo],
    steps: Sequence[StepDocument],
    first_rank: int | None = None,
) -> dict[str, Any]:
    """What the template shows of a run.

    Parameters
    ----------
    plan
        The plan of the run; None while a search is looking for it.
    index
        The logs and traces that ranks have sent.
    steps
        The measured steps, ascending.
    first_rank
        Where the page's ranks begin; None if nobody asked for some of them.
    """
    step, planned = reached_step(run), _planned_seconds(plan)
    count, first = run.nodes * run.ranks_per_node, first_rank or 0
    later = first + SHOWN_RANKS
    return {
        "is_open": run.state not in RUN_ENDED,
        "step": step,
        "share": _share(run, step),
        "facts": [*_facts(run, plan, planned, steps, step)],
        "times": step_chart(steps, planned) if steps else None,
        "losses": loss_chart(steps),
        "thinned": _thinned(steps),
        "ranks": [*_ranks(run, index, range(first, min(later, count)))],
        "rank_count": count,
        "are_ranks_open": first_rank is not None,
        "earlier_ranks": max(0, first - SHOWN_RANKS) if first else None,
        "later_ranks": later if later < count else None,
        "failures": [*map(_failure, (run.error or {}).get("failures") or ())],
        "earlier": [*map(_failure, _earlier(run))],
        "generations": sorted({part.generation for part in index}),
        "has_traces": any(part.kind == "trace" for part in index),
        "options": [*_options(run)],
    }


def _share(run: RunDocument, step: int | None) -> float | None:
    if run.steps is None:
        return None
    if run.state == "succeeded":
        return 1.0
    return 0.0 if step is None else min(1.0, step / run.steps)


def _planned_seconds(plan: PlanSummaryDocument | None) -> float | None:
    """The planned time of a step; None if the plan has no time unit."""
    unit = None if plan is None else NANOSECONDS.get(plan.time_unit or "")
    return None if plan is None or unit is None else plan.value * unit / 1e9


def _facts(
    run: RunDocument,
    plan: PlanSummaryDocument | None,
    planned: float | None,
    steps: Sequence[StepDocument],
    step: int | None,
) -> Iterator[Card]:
    done = run.steps if run.state == "succeeded" and run.steps is not None else step
    total = "" if run.steps is None else f"of {quantities.figure(run.steps, 12)}"
    yield Card("Step", "–" if done is None else quantities.figure(done, 12), total)
    latest = steps[-_LATEST:]
    if latest:
        middle = sorted(step.seconds for step in latest)[(len(latest) - 1) // 2]
        note = "median of the latest steps"
        if planned:
            note = f"planned {quantities.time(planned, SECONDS)}, {quantities.relative(middle, planned)}"
        yield Card("Step time", quantities.time(middle, SECONDS), note)
    elif planned:
        yield Card("Step time", "–", f"planned {quantities.time(planned, SECONDS)}")
    losses = [(step.step, step.loss) for step in steps if step.loss is not None]
    if losses:
        (_, begin), (last, loss) = losses[0], losses[-1]
        note = f"of step {last}" if len(losses) == 1 else f"of step {last}, from {quantities.figure(begin)}"
        yield Card("Loss", quantities.figure(loss), note)
    nodes = f"on {quantities.counted(run.nodes, 'node')}"
    replicas = run.options.data_parallel
    ranks = str(run.nodes * run.ranks_per_node)
    yield Card("Ranks", ranks, nodes if replicas == 1 else f"{replicas} replicas {nodes}")
    restarts = f"restarted {quantities.counted(run.generation, 'time')}"
    yield Card("Generation", str(run.generation), restarts if run.generation else "never restarted")
    if plan is not None:
        yield Card("Planned bubble", quantities.percent(plan.bubble_rate), "idle share of a span")


def _ranks(run: RunDocument, index: Sequence[PartInfo], ranks: range) -> Iterator[dict[str, Any]]:
    """These ranks of the current generation, with the newest generations that have a log and a trace."""
    newest: dict[tuple[str, int], int] = {}
    for part in index:
        key = (part.kind, part.rank)
        newest[key] = max(part.generation, newest.get(key, part.generation))
    nodes = {node.node_rank: node for node in run.members}
    places = {int(place["rank"]): place for node in run.members for place in node.ranks}
    for rank in ranks:
        node = nodes.get(rank // run.ranks_per_node)
        yield {
            "rank": rank,
            "node": node,
            "state": "waiting" if node is None else node.outcome or node.state,
            "place": places.get(rank, {}),
            "log": newest.get(("log", rank)),
            "trace": newest.get(("trace", rank)),
        }


def _earlier(run: RunDocument) -> Sequence[dict[str, Any]]:
    """The causes of failures before the last one."""
    last = run.generation if run.error is not None else None
    return [cause.model_dump() for cause in run.failures if cause.generation != last]


def _failure(failure: Mapping[str, Any]) -> dict[str, Any]:
    """Why a rank failed; for earlier generations also which one and when."""
    return {
        "rank": None,
        "agent": None,
        "where": place_of({**failure, "rank": None}),
        "detail": failure.get("message"),
        **failure,
    }


def _options(run: RunDocument) -> Iterator[tuple[str, str]]:
    yield "Model" if run.script is None else "Script", run.program
    if run.script is not None and run.script.arguments:
        yield "Arguments", shlex.join(run.script.arguments)[:1000]
    for name, value in (run.model.arguments if run.model else {}).items():
        yield f"Argument {name}", _text(value)
    yield "Submitted by", run.created_by or "–"
    for name, value in run.options:
        if run.script is not None and name not in OF_SCRIPTS:
            continue
        if value is not None and name != "checkpoint":
            unit = " s" if name in IN_SECONDS else ""
            yield name.replace("_", " ").capitalize(), _text(value) + unit
    checkpoint = run.options.checkpoint
    if checkpoint is not None:
        yield "Checkpoints", f"every {checkpoint.every} steps, in {checkpoint.directory}"


def _text(value: Any) -> str:
    """A JSON value as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return quantities.figure(value)
    return str(value)[:200]


_FEW = 60
"""Steps of a curve whose values are marked."""


def step_chart(steps: Sequence[StepDocument], planned: float | None) -> dict[str, Any]:
    """The chart of the times of one or more steps, in seconds, with the planned time if it is known."""
    shown = evenly(steps)
    first, last = shown[0].step, shown[-1].step
    y = Scale(_HEADROOM * max(*(step.seconds for step in shown), planned or 0.0) or 1.0, 0.0)
    x = Scale(first - 0.5, last + 0.5)
    apart = median([other.step - one.step for one, other in pairwise(shown)] or [1])
    width = max(0.1, 72 * apart / (last - first + 1))
    least, most = (quantities.time(pick(step.seconds for step in shown), SECONDS) for pick in (min, max))
    summary = f"Times of steps {first} to {last}: {least} to {most}"
    return {
        "summary": f"{summary}{f'; planned {quantities.time(planned, SECONDS)}' if planned else ''}.",
        "bars": [
            (
                round(x(step.step) - width / 2, 3),
                y(step.seconds),
                f"step {step.step}: {quantities.time(step.seconds, SECONDS)}",
            )
            for step in shown
        ],
        "width": round(width, 3),
        "y_ticks": y.ticks(_TICKS, quantities.timer(y.first, SECONDS)),
        "x_ticks": _step_ticks(x, first, last),
        "planned": None if planned is None else y(planned),
    }


def loss_chart(steps: Sequence[StepDocument]) -> dict[str, Any] | None:
    """The loss curve; None with fewer than two losses."""
    known = [(step.step, step.loss) for step in steps if step.loss is not None]
    if len(known) < 2:
        return None
    shown = evenly(known)
    (first, begin), (last, end) = shown[0], shown[-1]
    low, high = min(loss for _, loss in shown), max(loss for _, loss in shown)
    pad = 0.12 * (high - low) or 0.05 * abs(high) or 1.0
    x, y = Scale(first, last), Scale(high + pad, low - pad)
    places = [(x(step), y(loss)) for step, loss in shown]
    texts = [f"step {step}: loss {quantities.figure(loss)}" for step, loss in shown]
    return {
        "summary": f"Loss from {quantities.figure(begin)} at step {first} to {quantities.figure(end)} at "
        f"step {last}.",
        "pieces": [(*one, *other) for one, other in pairwise(places)],
        "dots": places if len(places) <= _FEW else places[-1:],
        "hits": [(*strip, text) for strip, text in zip(strips([at for at, _ in places]), texts, strict=True)],
        "y_ticks": y.ticks(_TICKS),
        "x_ticks": _step_ticks(x, first, last),
    }


def _step_ticks(x: Scale, first: int, last: int) -> list[tuple[float, str]]:
    """Round numbers of steps."""
    return [(x(at), quantities.figure(at, 12)) for at in quantities.ticks(first, last, _TICKS) if at % 1 == 0]


def _thinned(steps: Sequence[StepDocument]) -> str:
    """What the charts of a long run leave out."""
    shown = min(len(steps), MOST_DRAWN)
    every = steps[-1].step - steps[0].step + 1 if steps else 0
    if shown == every:
        return ""
    return f"{shown} of {quantities.figure(every, 12)} steps, evenly spread, with the first and the newest."
