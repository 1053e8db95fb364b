"""The view of a measured step: planned and measured values refer to the same quantity."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
from support.rank_traces import trace_documents
from zbv_service.pages.measured import measured_values
from zbv_service.pages.words import tone
from zbv_service.runs.measurements import Measured, TraceSource, measure
from zbv_solver.measure.rank_trace import parse_rank_trace
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import Objective
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.assemble import make_plan

LISTS = [["0F0", "0I0", "0W0"], ["1F0", "1I0", "1W0"]]
COSTS = {"forward": [1, 2], "backward_input": 1, "backward_weight": [1, 10]}


def planned(objective: Objective, costs: Any = COSTS) -> Plan:
    """Rank 1 begins late and ends last: the makespan, 14, is more than the span, 13."""
    shape = {"pp_degree": 2, "microbatches": 1, "placement": "single", "units": {"time": "us"}}
    problem = parse_problem({**shape, "objective": objective, "costs": costs})
    return make_plan(problem, Orders.from_text(LISTS), method="by hand")


def view_of(plan: Plan, actual: Plan, *, steps: int = 1, ranks: tuple[int, ...] = (0, 1)) -> dict[str, Any]:
    """The view of a plan if its actions took as long as another plan's."""
    documents = trace_documents(actual.problem, actual.orders, plan_id=plan.plan_id, steps=steps)
    found = measure(plan, [parse_rank_trace(documents[rank]) for rank in ranks], None, TraceSource())
    assert isinstance(found, Measured)
    return measured_values(found, "")


def idle_notes(view: dict[str, Any]) -> list[list[str]]:
    """The idle shares next to the rows of each lane, by rank."""
    return [canvas.idle.replace("\u202f", "").split(" ") for canvas in view["lanes"]["canvases"]]


@pytest.mark.parametrize(("objective", "length"), [("span", 13), ("makespan", 14)])
def test_a_step_that_went_as_planned_is_as_idle_as_planned(objective: Objective, length: int) -> None:
    plan = planned(objective)
    assert plan.objective == length
    view = view_of(plan, plan)
    cards = {card.label: card for card in view["cards"]}
    share = f"{100 * (1 - 16 / (2 * length)):.1f}\u202f%"
    assert cards["Planned"].value == cards["Measured"].value == f"{length} µs"
    assert cards["Idle"].value == share
    assert cards["Idle"].note == f"of the step; planned {share}"
    assert [row.difference.total for row, _ in view["accounts"]] == [0, 0]
    above, below = idle_notes(view)
    assert above == below == [f"{100 * (1 - busy / length):.1f}%" for busy in (3, 13)]


def test_planned_values_of_a_rank_are_its_own() -> None:
    plan = planned("makespan")
    view = view_of(plan, plan, ranks=(1,))
    (idle,) = [card for card in view["cards"] if card.label == "Idle"]
    assert "planned 7.1" in idle.note, "13 of 14"
    assert any("Rank 0 has not sent this step" in notice for notice in view["notices"])


def test_the_parts_add_up_to_the_total() -> None:
    plan = planned("makespan")
    view = view_of(plan, planned("makespan", {**COSTS, "forward": [4, 2]}))
    for row, bar in view["accounts"]:
        shown = [getattr(row.difference, name) for name, _, _ in view["parts"]]
        assert sum(shown) == pytest.approx(row.difference.total) == 3
        assert sum(width for _, _, width in bar) == pytest.approx(100 * sum(map(abs, shown)) / 3, abs=0.1)


def test_an_action_planned_to_take_no_time_has_no_ratio() -> None:
    costs = {**COSTS, "backward_input": 0}
    view = view_of(planned("span", costs), planned("span"))
    ratios = {letter: view["kinds"][0, letter].ratio for letter in "FI"}
    assert ratios == {"F": 1.0, "I": inf}
    assert [tone(ratio) for ratio in (inf, 1.06, 1.0, 0.94)] == ["slow", "slow", "", "fast"]
