"""The page of one run: its state, the time of its steps, its events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from zbv_solver.export import quantities
from zbv_solver.measure.refit import NANOSECONDS

from zbv_service.pages.shell import Shell, render
from zbv_service.pages.views.run_charts import LossChart, StepChart, duration, loss_chart, step_chart
from zbv_service.records.runs import RUN_ENDED, EventRecord, PartInfo, RunRecord, place_of
from zbv_service.records.searches import PlanSummary
from zbv_service.runs.steps import StepLine
from zbv_service.security.scopes import allows


@dataclass(frozen=True)
class Fact:
    """A number with a label; ``note`` explains it and may be empty."""

    label: str
    value: str
    note: str


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
class PlanOffer:
    """A plan that is better with the measured costs."""

    plan_id: str
    gain: str


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

    run: RunRecord
    is_open: bool
    may_launch: bool
    step: int | None
    share: float
    facts: tuple[Fact, ...]
    steps: StepChart | None
    losses: LossChart | None
    ranks: tuple[RankRow, ...]
    offer: PlanOffer | None
    failures: tuple[Failure, ...]
    earlier: tuple[Failure, ...]
    events: tuple[EventRecord, ...]
    generations: tuple[int, ...]
    has_traces: bool
    options: tuple[tuple[str, str], ...]


def run_page(view: RunView, shell: Shell) -> str:
    """The page of a run; a script keeps it up to date until the run ends."""
    return render("run.html.j2", shell, view=view, run=view.run)


def run_view(
    run: RunRecord,
    plan: PlanSummary | None,
    events: Sequence[EventRecord],
    index: Sequence[PartInfo],
    lines: Sequence[StepLine],
    shell: Shell,
) -> RunView:
    """A run, ready for the template.

    Parameters
    ----------
    plan
        The plan of the run; None while a search is looking for it.
    events
        Newest first.
    lines
        The newest measured steps, ascending.
    """
    step = _slowest(run)
    planned = _seconds(plan)
    return RunView(
        run=run,
        is_open=run.state not in RUN_ENDED,
        may_launch=not shell.may or allows(shell.may, ("launch",)),
        step=step,
        share=_share(run, step),
        facts=tuple(_facts(run, plan, planned, lines, step)),
        steps=step_chart(lines, planned) if lines else None,
        losses=loss_chart(lines),
        ranks=tuple(_ranks(run, index)),
        offer=_offer(run),
        failures=tuple(map(_failure, (run.error or {}).get("failures") or ())),
        earlier=tuple(map(_failure, _earlier(run))),
        events=tuple(events),
        generations=tuple(sorted({part.generation for part in index})),
        has_traces=any(part.kind == "trace" for part in index),
        options=tuple(_options(run)),
    )


def _slowest(run: RunRecord) -> int | None:
    """The step of the slowest rank; None before all ranks have reported one."""
    steps = [place.get("step") for node in run.members for place in node.ranks]
    known = [step for step in steps if step is not None]
    return min(known) if known and len(known) == len(steps) else None


def _share(run: RunRecord, step: int | None) -> float:
    """The completed share of the steps."""
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
) -> Iterator[Fact]:
    done = run.steps if run.state == "succeeded" else step
    yield Fact(
        "Step",
        "–" if done is None else f"{done:,}".replace(",", "\u202f"),
        f"of {run.steps:,}".replace(",", "\u202f"),
    )
    if lines:
        middle = sorted(line.seconds for line in lines)[(len(lines) - 1) // 2]
        note = "median of the latest steps"
        if planned:
            note = f"planned {duration(planned)}, {quantities.relative(middle, planned)}"
        yield Fact("Step time", duration(middle), note)
    elif planned:
        yield Fact("Step time", "–", f"planned {duration(planned)}")
    for line in reversed(lines):
        if line.loss is not None:
            yield Fact("Loss", quantities.figure(line.loss), f"of step {line.step}")
            break
    ranks = run.nodes * run.ranks_per_node
    nodes = f"on {run.nodes} node{'' if run.nodes == 1 else 's'}"
    replicas = int(run.options.get("data_parallel", 1))
    yield Fact("Ranks", str(ranks), nodes if replicas == 1 else f"{replicas} replicas {nodes}")
    again = (
        "never restarted"
        if run.generation == 0
        else f"restarted {run.generation} time{'' if run.generation == 1 else 's'}"
    )
    yield Fact("Generation", str(run.generation), again)
    if plan is not None:
        yield Fact("Planned bubble", quantities.percent(plan.bubble_rate), "idle share of a span")


def _ranks(run: RunRecord, index: Sequence[PartInfo]) -> Iterator[RankRow]:
    """Every rank of the current generation, with its newest log and trace."""
    newest: dict[tuple[str, int], int] = {}
    for part in index:
        key = (part.kind, part.rank)
        newest[key] = max(part.generation, newest.get(key, part.generation))
    nodes = {node.node_rank: node for node in run.members}
    places = {int(place["rank"]): place for node in run.members for place in node.ranks}
    for rank in range(run.nodes * run.ranks_per_node):
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


def _offer(run: RunRecord) -> PlanOffer | None:
    if run.offer is None:
        return None
    gain = 1 - run.offer["objective_then"] / run.offer["objective_now"]
    return PlanOffer(str(run.offer["plan_id"]), quantities.percent(gain, 1))


def _earlier(run: RunRecord) -> Sequence[dict[str, Any]]:
    """The causes of failures before the last one, which :func:`run_view` shows in full."""
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
    yield "Model", str(run.model["factory"])
    for name, value in run.model.get("arguments", {}).items():
        yield f"Argument {name}", _told(value)
    yield "Submitted by", run.created_by or "–"
    for name, value in run.options.items():
        if value is not None and not isinstance(value, dict):
            yield name.replace("_", " ").capitalize(), _told(value)
    checkpoint = run.options.get("checkpoint")
    if checkpoint:
        yield "Checkpoints", f"every {checkpoint['every']} steps, in {checkpoint['directory']}"


def _told(value: Any) -> str:
    """A JSON value as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)[:200]
