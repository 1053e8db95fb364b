"""Plans whose microbatches differ: every export and page uses the costs of the action's own microbatch."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from zbv_solver.errors import InvalidInput
from zbv_solver.export import FORMATS, export
from zbv_solver.export.report.figures import cost_facts, cost_values
from zbv_solver.export.report.sections import MOST_MICROBATCHES, microbatches_view
from zbv_solver.export.timeline import timeline, timeline_facts
from zbv_solver.export.torch_csv import batch_order, renumbered
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_any_problem, parse_problem
from zbv_solver.search.assemble import make_plan
from zbv_solver.timing.start_times import evaluate

LENGTHS = [4, 1, 3, 2]
ENTRY = [1, 2, 0, 3]


def problem_of(**changes: Any) -> Problem:
    document = {
        "pp_degree": 2,
        "microbatches": 4,
        "placement": "single",
        "features": {"tokens": LENGTHS},
        "costs": {
            "forward": {"fixed": 1, "tokens": 2},
            "backward_input": {"tokens": 2},
            "backward_weight": {"tokens": 1},
            "p2p": {"tokens": 1},
        },
        "memory": {"forward": {"tokens": 1}, "backward_input": 0, "backward_weight": {"tokens": -1}},
        "units": {"time": "us"},
    }
    return parse_problem({**document, **changes})


def plan_of(problem: Problem, entry: list[int] = ENTRY) -> Plan:
    """Forwards and then whole backwards, in an order of entry."""
    ranks = [
        [(rank, "F", j) for j in entry] + [(rank, "B", j) for j in entry] for rank in range(problem.pp_degree)
    ]
    return make_plan(problem, Orders.from_actions(ranks), method="by hand")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(problem_of())


def test_renumbered_microbatches_keep_their_features(plan: Plan) -> None:
    problem, orders = renumbered(plan.problem, plan.orders)
    assert batch_order(plan) == ENTRY
    assert problem.features[0].value == tuple(LENGTHS[j] for j in ENTRY)
    assert orders.text(1)[:4] == ["1F0", "1F1", "1F2", "1F3"]
    assert evaluate(problem, orders).makespan == plan.metrics.makespan


def test_no_order_of_the_batch_is_asked_for_where_it_does_not_matter() -> None:
    equal = problem_of(features={"tokens": [2, 2, 2, 2]})
    assert batch_order(plan_of(equal)) is None
    assert batch_order(plan_of(problem_of(), [0, 1, 2, 3])) is None


def test_torchtitan_gets_the_order_of_the_batch(plan: Plan) -> None:
    assert "#   1, 2, 0, 3" in export(plan, "torchtitan")


def test_traces_have_the_features_and_the_durations_of_microbatches(plan: Plan) -> None:
    events = json.loads(export(plan, "chrome-trace"))["traceEvents"]
    forwards = [each for each in events if each["ph"] == "X" and each["args"]["letter"] == "F"]
    for event in forwards:
        tokens = LENGTHS[event["args"]["microbatch"]]
        assert event["args"]["feature tokens"] == tokens
        assert event["dur"] == 1 + 2 * tokens
    assert any(each["ph"] == "C" for each in events), "memory that only depends on features is drawn, too"


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_written(plan: Plan, name: str) -> None:
    assert len(export(plan, name)) > 10


def test_scripts_get_costs_by_kind(plan: Plan) -> None:
    line, problem = timeline(plan), plan.problem
    facts = timeline_facts(line, problem)
    kind = np.array(facts["kind_of"])[line.microbatch]
    assert facts["features"] == [["tokens", tuple(LENGTHS)]]
    assert np.array(facts["durations"])[line.letter, line.stage, kind] == pytest.approx(line.end - line.start)


def test_facts_are_ranges_over_microbatches() -> None:
    facts = dict(cost_facts(problem_of()))
    assert facts["Forward F"] == "3 to 9 µs, by microbatch"
    assert facts["Transfer"] == "1 to 4 µs, by microbatch"
    assert facts["Feature tokens"] == "1 to 4"
    assert cost_values(problem_of())["memory forward"] == (4, 1, 3, 2, 4, 1, 3, 2)


def test_microbatches_are_listed_in_the_order_of_entry(plan: Plan) -> None:
    view = microbatches_view(plan)
    assert view is not None
    assert [row.microbatch for row in view.rows] == ENTRY
    assert [row.height for row in view.rows] == pytest.approx(
        [12 / 42 * 100, 32 / 42 * 100, 100, 22 / 42 * 100], abs=0.01
    )
    assert view.rows[0].features == ("1",)
    assert microbatches_view(plan_of(problem_of(features={"tokens": [2, 2, 2, 2]}))) is None


def test_many_microbatches_are_shown_in_part() -> None:
    count = MOST_MICROBATCHES + 10
    problem = problem_of(microbatches=count, features={"tokens": list(range(count))}, pp_degree=1)
    view = microbatches_view(plan_of(problem, list(range(count))))
    assert view is not None
    assert len(view.rows) == MOST_MICROBATCHES
    assert f"The first {MOST_MICROBATCHES} of {count} microbatches" in view.summary


@pytest.mark.parametrize("key", ["features", "sequences"])
def test_layers_with_features_are_refused_with_the_way_out(key: str) -> None:
    layer = {"name": "a", "forward": 1, "backward_input": 1, "backward_weight": 1}
    document = {"pp_degree": 1, "microbatches": 1, "layers": [layer, {**layer, "name": "b"}]}
    with pytest.raises(InvalidInput, match="layers are the same for every microbatch") as raised:
        parse_any_problem({**document, key: [[1]] if key == "sequences" else {"tokens": [1]}})
    assert raised.value.issues[0].pointer == f"/{key}"
