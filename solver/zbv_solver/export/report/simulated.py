"""The section of a plan's page about durations that vary: a table of schedules in the same scenarios."""

from __future__ import annotations

from dataclasses import dataclass

from zbv_solver.export import quantities
from zbv_solver.kernels.jit import can_compile
from zbv_solver.plans.plan import Plan, Simulation, Spans
from zbv_solver.problem.jitter import Jitter, Spread

MOST_SIMULATED = 1 << 24
"""Scenarios times actions that are simulated for a page: about two seconds."""
FEWEST_SCENARIOS = 64


@dataclass(frozen=True)
class SimulatedRow:
    """A schedule; ``relative`` compares its p95 with the plan's and is empty for the plan itself."""

    name: str
    planned: str
    expected: str
    p95: str
    fits: bool
    relative: str
    is_plan: bool


@dataclass(frozen=True)
class SimulationView:
    """The content of the section; ``about`` says by how much durations vary."""

    rows: tuple[SimulatedRow, ...]
    about: str


def simulation_view(plan: Plan) -> SimulationView | None:
    """The plan's own simulation, else one with the default jitter; None if that would take long."""
    found = plan.simulation or _simulated(plan)
    if found is None:
        return None
    is_span = plan.problem.objective == "span"

    def shown(spans: Spans) -> tuple[float, float]:
        if is_span:
            return spans.expected_span, spans.p95_span
        return spans.expected_makespan, spans.p95_makespan

    planned = {each.name: each.span if is_span else each.makespan for each in plan.baselines}
    own = shown(found.spans)[1]
    rows = [
        SimulatedRow(
            name,
            quantities.figure(value) if value is not None else "–",
            quantities.figure(shown(spans)[0]),
            quantities.figure(shown(spans)[1]),
            fits,
            "" if spans is found.spans else quantities.relative(shown(spans)[1], own),
            spans is found.spans,
        )
        for name, value, spans, fits in (
            ("this plan", plan.objective, found.spans, True),
            *((each.name, planned.get(each.name), each.spans, each.fits) for each in found.baselines),
        )
    ]
    return SimulationView(tuple(rows), _about(found))


def _simulated(plan: Plan) -> Simulation | None:
    if not can_compile() or len(plan.orders) == 0:
        return None
    # Imported here because pages are also written where kernels cannot be compiled.
    from zbv_solver.search.jitter import DEFAULT_JITTER, SCENARIOS, simulate

    scenarios = min(SCENARIOS, MOST_SIMULATED // len(plan.orders))
    return simulate(plan, DEFAULT_JITTER, scenarios=scenarios) if scenarios >= FEWEST_SCENARIOS else None


def _about(found: Simulation) -> str:
    return (
        f"{found.scenarios} simulated iterations in which durations vary, the same for every schedule; "
        f"standard deviations: {deviations(found.jitter)}. 95 % of the iterations take at most p95."
    )


def deviations(jitter: Jitter) -> str:
    """The standard deviations of actions, ranks and transfers, in words."""
    return f"{_actions(jitter)}{_ranks(jitter)}, transfers {_of(jitter.transfer)}"


def _actions(jitter: Jitter) -> str:
    forward, *others = jitter.actions
    if all(each == forward for each in others):
        return f"actions {_of(forward)}"
    return ", ".join(f"{letter} {_of(each)}" for letter, each in zip("FIWB", jitter.actions, strict=True))


def _ranks(jitter: Jitter) -> str:
    if all(each.is_constant for each in jitter.rank):
        return ""
    return f", ranks {_of(jitter.rank[0])}" if len(jitter.rank) == 1 else ", ranks by rank"


def _of(spread: Spread) -> str:
    return "as measured" if spread.samples else quantities.percent(spread.deviation, 1)
