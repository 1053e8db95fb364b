"""``/runs/{run_id}/measured``: a measured step of a run compared with its plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, fields, replace
from functools import partial
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query, Request, Response
from zbv_solver.export import quantities, report
from zbv_solver.export.timeline import Timeline, idle_shares, timeline
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import LETTERS, Units

from zbv_service.api.negotiation import root_of
from zbv_service.api.state import state_of
from zbv_service.compute.computations import ROWS_OF_NODE
from zbv_service.pages.assets import assets
from zbv_service.pages.lanes import Lane, lanes_values
from zbv_service.pages.run import MAX_INDEX, Index
from zbv_service.pages.shell import page
from zbv_service.pages.words import NOTICEABLE, signed
from zbv_service.records.runs import RUN_ENDED
from zbv_service.runs.measured.accounts import PAIR, Parts, RankAccount
from zbv_service.runs.measured.explain import Cause, Explanation, sentence, told
from zbv_service.runs.measured.step import IntArray, MeasuredStep, first_halves
from zbv_service.runs.measurements import Chosen, Measured, NothingMeasured, TraceSource
from zbv_service.security.access import READ

router = APIRouter(include_in_schema=False)


@router.get("/runs/{run_id}/measured", dependencies=[READ])
async def get_measured_page(
    request: Request,
    run_id: str,
    generation: Index = None,
    replica: Annotated[int, Query(ge=0, le=MAX_INDEX)] = 0,
    step: Annotated[str, Query(pattern=r"^[0-9]{0,10}$")] = "",
) -> Response:
    """A measured step compared with its plan. A form without a choice sends an empty step."""
    found = state_of(request)
    async with found.computations.listing(ROWS_OF_NODE * (await found.runs.brief(run_id)).nodes):
        run = await found.runs.get(run_id)
    chosen = Chosen(generation, replica, int(step) if step else None)
    measured = await found.measurements.of(run, chosen, partial(_shown, root_of(request)))
    if isinstance(measured, NothingMeasured):
        is_early = measured.reason == "early" and run.state not in RUN_ENDED
        values: dict[str, Any] = {"nothing": measured, "is_early": is_early}
    else:
        values = measured
    return await page(request, "measured.html.j2", run_id=run.id, **values)


def _shown(root: str, found: Measured) -> dict[str, Any]:
    """What the page shows of a measured step; runs in another process."""
    source = TraceSource(**{each.name: getattr(found, each.name) for each in fields(TraceSource)})
    return {
        "found": source,
        **measured_values(found, root),
    }


PARTS = (
    ("compute", "Actions", "Actions that took longer or shorter than planned"),
    ("transfer", "Transfer", "Idle while an input was being transferred"),
    ("waiting", "Waiting", "Idle before an input was computed, or before and after all work"),
    ("between", "Overhead", "From the end of an action to the start of waiting for the next one"),
)
"""The parts of a rank's step: name in :class:`Parts`, heading of the column, meaning."""
_CAUSES = 4
_BAR = 200.0


def measured_values(found: Measured, root: str) -> dict[str, Any]:
    """What the template shows of a measured step. Slow: it lays out every action."""
    units = found.plan.problem.units
    unit = quantities.time_unit(units)
    accounts = _accounts(found)
    return {
        "plan_id": found.plan.plan_id,
        "step": found.step.step,
        "is_typical": found.is_typical,
        "headline": _headline(found),
        "finding": sentence(found.explanation),
        "cards": [*_cards(found, units)],
        "causes": _causes(found.explanation),
        "notices": [*_notices(found, units)],
        "lanes": lanes_values(_lanes(found, root), unit),
        "units": units,
        "parts": PARTS,
        "accounts": [*zip(accounts, bars([row.difference for row in accounts]), strict=True)],
        "ranks": sorted({kind.rank for kind in found.kinds}),
        "letters": [
            letter for letter in (*LETTERS, PAIR) if any(kind.letter == letter for kind in found.kinds)
        ],
        "kinds": {(kind.rank, kind.letter): kind for kind in found.kinds},
        "lengths": found.lengths,
    }


def _headline(found: Measured) -> str:
    count = len(found.lengths)
    which = f"Step {found.step.step}"
    if found.is_typical and count > 1:
        which += f", the median of the {count} newest steps by length"
    shown = f"{which}, generation {found.generation}"
    return f"{shown}, replica {found.replica}." if len(found.replicas) > 1 else f"{shown}."


def _cards(found: Measured, units: Units) -> Iterator[report.Card]:
    account, objective = found.account, found.plan.problem.objective
    means = {
        "span": "slowest rank, first start to last end",
        "makespan": "first start to last end of all ranks",
    }
    yield report.Card("Planned", quantities.time(account.planned, units), f"the plan's {objective}")
    yield report.Card("Measured", quantities.time(account.measured, units), means[objective])
    relative = quantities.relative(account.measured, account.planned)
    is_off = account.planned > 0 and account.measured / account.planned > 1 + NOTICEABLE
    yield report.Card(
        "Difference",
        relative,
        signed(account.difference, units),
        "bad" if is_off else "",
    )
    idle = _idle_share([row.measured.compute for row in account.ranks], account.measured)
    planned = _idle_share([row.planned.compute for row in account.ranks], account.planned)
    note = f"of the step; planned {quantities.percent(planned, 1)}"
    yield report.Card("Idle", quantities.percent(idle, 1), note)


def _idle_share(busy: Sequence[float], length: float) -> float:
    """The share of a step that some ranks do not compute."""
    return 1 - sum(busy) / (len(busy) * length) if busy and length > 0 else 0.0


def _causes(explanation: Explanation) -> list[tuple[str, float, float, float]]:
    """For each cause its text, its effect alone, its share of the difference, and its bar's width."""
    main = explanation.main
    if main is None:
        return []
    others = [cause for cause in explanation.causes if cause != main and _matters(cause, explanation)]
    chosen = [main, *others][:_CAUSES]
    largest = max(abs(cause.effect) for cause in chosen) or 1.0
    return [
        (told(cause), cause.effect, explanation.share(cause), round(100 * abs(cause.effect) / largest, 2))
        for cause in chosen
    ]


def _matters(cause: Cause, explanation: Explanation) -> bool:
    """Whether a cause explains enough and does not repeat the main one."""
    main = explanation.main
    if abs(explanation.share(cause)) < NOTICEABLE or main is None:
        return False
    is_wider = (
        cause.kind == main.kind and cause.rank in (None, main.rank) and cause.letter in (None, main.letter)
    )
    return not (is_wider and abs(cause.effect - main.effect) <= NOTICEABLE * abs(main.effect))


def _notices(found: Measured, units: Units) -> Iterator[str]:
    if found.missing:
        ranks = ", ".join(map(str, found.missing[:8])) + (" …" if len(found.missing) > 8 else "")
        who = f"Rank {ranks} has" if len(found.missing) == 1 else f"Ranks {ranks} have"
        yield f"{who} not sent this step. All values are those of the other ranks."
    conflict = found.conflict
    if conflict.count:
        yield (
            f"The clocks of the ranks disagree: {conflict.count} of {conflict.inputs} inputs arrived before "
            f"being sent, by up to {quantities.time(conflict.worst, units)}. Times within a rank are right, "
            f"but ranks are shifted against each other, and transfer and waiting cannot be separated."
        )
    if not found.has_named_unit:
        yield (
            "The plan has no time unit. The page scales the measurements so that the actions take as long in "
            "total as planned: only proportions can differ."
        )


def _lanes(found: Measured, root: str) -> list[Lane]:
    plan, account, units = found.plan, found.account, found.plan.problem.units
    planned = timeline(plan)
    return [
        Lane(
            f"planned: {quantities.time(account.planned, units)}",
            planned,
            plan.problem,
            f"{root}/plans/{plan.plan_id}/actions?v={assets()}",
            idle=tuple(_planned_idle(plan)),
        ),
        Lane(
            f"measured, step {found.step.step}: {quantities.time(account.measured, units)}",
            measured_timeline(planned, found.step, first_halves(plan)),
            plan.problem,
            is_measured=True,
            idle=tuple(_idle(found)),
        ),
    ]


def _planned_idle(plan: Plan) -> Iterator[float]:
    """The idle share of each rank in the planned step."""
    scale = plan.metrics.span / plan.objective if plan.objective > 0 else 1.0
    for share in idle_shares(plan):
        yield 1 - (1 - share) * scale


def _idle(found: Measured) -> Iterator[float]:
    """The idle share of each rank in the step; 1 for ranks without measurements."""
    busy = {row.rank: row.measured.compute for row in found.account.ranks}
    length = found.account.measured
    for rank in range(found.plan.problem.pp_degree):
        yield 1 - busy.get(rank, 0.0) / length if length > 0 else 0.0


def measured_timeline(planned: Timeline, step: MeasuredStep, first: IntArray) -> Timeline:
    """The step laid out like its plan, without ranks that sent nothing.

    ``first`` are the indices of the pairs' first actions. As in a plan, a pair is one block with two halves.
    """
    known = np.isfinite(step.start)
    start, end = step.start.copy(), step.end.copy()
    start[first] = np.minimum(start[first], start[first + 1])
    end[first + 1] = np.maximum(end[first], end[first + 1])
    end[first] = start[first + 1] = (start[first] + end[first + 1]) / 2
    counts = np.array([int(known[planned.slice_of(rank)].sum()) for rank in range(planned.pp_degree)])
    columns = ("rank", "chunk", "stage", "letter", "microbatch", "kind", "during", "after")
    return replace(
        planned,
        start=start[known],
        end=end[known],
        copies=None,
        offset=np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
        **{name: getattr(planned, name)[known] for name in columns},
    )


def _accounts(found: Measured) -> tuple[RankAccount, ...]:
    """The accounts; if clocks disagree, waiting includes transfer."""
    if not found.conflict.count:
        return found.account.ranks
    return tuple(
        replace(row, planned=row.planned.without_transfer(), measured=row.measured.without_transfer())
        for row in found.account.ranks
    )


def bars(differences: Sequence[Parts]) -> list[list[tuple[str, float, float]]]:
    """For each rank its parts with their left ends and widths, on one scale.

    A bar is 200 wide. Slower parts are at the right of its middle, faster ones at the left.
    """
    reach = max((max(_gains_and_losses(parts)) for parts in differences), default=0.0) or 1.0
    return [[*_segments(parts, _BAR / 2 / reach)] for parts in differences]


def _segments(parts: Parts, scale: float) -> Iterator[tuple[str, float, float]]:
    right = left = _BAR / 2
    for name, _, _ in PARTS:
        width = scale * abs(getattr(parts, name))
        if width < 0.01:
            continue
        if getattr(parts, name) > 0:
            yield name, round(right, 2), round(width, 2)
            right += width
        else:
            left -= width
            yield name, round(left, 2), round(width, 2)


def _gains_and_losses(parts: Parts) -> tuple[float, float]:
    """The sums of the positive and of the negative parts, both as positive numbers."""
    values: tuple[float, ...] = astuple(parts)
    return sum(value for value in values if value > 0), -sum(value for value in values if value < 0)
