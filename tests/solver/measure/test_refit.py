"""Refitting recovers the costs that traces were made from."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.rank_traces import mixed_orders, trace_documents
from zbv_solver.commands.cli import main
from zbv_solver.errors import InvalidInput
from zbv_solver.measure.rank_trace import RankTrace, parse_rank_trace
from zbv_solver.measure.refit import largest_change, refit
from zbv_solver.plans.orders import Action, Orders
from zbv_solver.plans.plan import plan_json
from zbv_solver.problem.problem import Problem, Units
from zbv_solver.problem.reading import parse_problem
from zbv_solver.problem.stages import Costs, PlacementKind
from zbv_solver.problem.writing import problem_json
from zbv_solver.search.assemble import make_plan

PLANNED: dict[str, Any] = {
    "pp_degree": 3,
    "microbatches": 5,
    "costs": {"forward": 10, "backward_input": 10, "backward_weight": 10, "backward": 18, "p2p": 4},
    "units": {"time": "us"},
}


def planned(**changes: Any) -> Problem:
    return parse_problem({**PLANNED, **changes})


def really(problem: Problem) -> Problem:
    """The same pipeline with different costs for every stage and boundary."""
    n = problem.n_stages

    def ramp(first: float) -> tuple[float, ...]:
        return tuple(first + stage for stage in range(n))

    costs = Costs(ramp(11), ramp(21), ramp(31), ramp(2)[: n - 1], ramp(45))
    return replace(problem, costs=costs)


def orders_of(problem: Problem, is_fused: Callable[[int], bool] = lambda j: j % 2 == 0) -> Orders:
    return mixed_orders(problem, is_fused)


def only_fused(_microbatch: int) -> bool:
    return True


def only_split(_microbatch: int) -> bool:
    return False


def traces_of(problem: Problem, orders: Orders, **how: Any) -> list[RankTrace]:
    return [parse_rank_trace(document) for document in trace_documents(problem, orders, **how)]


@pytest.mark.parametrize("placement", ["v", "loop", "single"])
def test_every_measured_cost_is_recovered(placement: PlacementKind) -> None:
    problem = planned(placement=placement)
    actual = really(problem)
    found = refit(problem, traces_of(actual, orders_of(problem)))
    assert found.costs.forward == actual.costs.forward
    assert found.costs.backward_input == actual.costs.backward_input
    assert found.costs.backward_weight == actual.costs.backward_weight
    assert found.costs.backward == actual.costs.backward
    assert (found.memory, found.placement, found.units) == (problem.memory, problem.placement, problem.units)


def test_only_inputs_that_a_rank_waited_for_measure_latency() -> None:
    problem = planned()
    actual = really(problem)
    orders = orders_of(problem)
    found, waited = refit(problem, traces_of(actual, orders)), waited_for(actual, orders)
    assert waited
    for boundary in range(problem.n_stages - 1):
        known = boundary in waited and not problem.placement.is_local(boundary)
        assert found.costs.p2p[boundary] == (actual if known else problem).costs.p2p[boundary]


def waited_for(problem: Problem, orders: Orders) -> set[int]:
    """Boundaries with an input that a rank waited for before it was sent."""
    rows = [row for document in trace_documents(problem, orders) for row in document["steps"][0]["actions"]]
    sent = {}
    for text, _, _, end, _ in rows:
        stage, letter, j = Action.parse(text)
        if letter != "W":
            sent[stage, letter == "F", j] = end
    found = set()
    for text, wait, *_ in rows:
        stage, letter, j = Action.parse(text)
        source = stage - 1 if letter == "F" else stage + 1
        if letter != "W" and wait < sent.get((source, letter == "F", j), 0):
            found.add(min(stage, source))
    return found


def test_clock_offsets_have_no_effect() -> None:
    problem = planned()
    actual, orders = really(problem), orders_of(problem)
    apart = traces_of(actual, orders, ahead=[0, 123_456_789, -(10**15)])
    assert refit(problem, apart) == refit(problem, traces_of(actual, orders))


def test_an_outlier_in_one_step_has_no_effect() -> None:
    problem = planned()
    actual, orders = really(problem), orders_of(problem)
    documents = trace_documents(actual, orders, steps=3)
    for row in documents[0]["steps"][1]["actions"]:
        row[3] += 50_000
    assert refit(problem, list(map(parse_rank_trace, documents))).costs.forward == actual.costs.forward


def test_replicas_count_equally_and_inputs_come_from_the_same_replica() -> None:
    problem = planned()
    actual, orders = really(problem), orders_of(problem)
    slow = replace(actual, costs=replace(actual.costs, forward=tuple(3 * f for f in actual.costs.forward)))
    both = traces_of(actual, orders) + traces_of(slow, orders, replica=1)
    found = refit(problem, both).costs
    assert found.forward == tuple(2 * f for f in actual.costs.forward)
    assert found.backward_input == actual.costs.backward_input
    assert max(found.p2p) <= max(*actual.costs.p2p, *problem.costs.p2p)


@pytest.mark.parametrize(("is_fused", "absent"), [(only_split, "B"), (only_fused, "IW")])
def test_unmeasured_costs_stay_in_proportion(is_fused: Callable[[int], bool], absent: str) -> None:
    problem = planned()
    twice = replace(
        problem,
        costs=Costs((20.0,) * 6, (20.0,) * 6, (20.0,) * 6, (4.0,) * 5, (36.0,) * 6),
    )
    orders = orders_of(problem, is_fused)
    assert not any(letter in text for texts in orders.all_text() for text in texts for letter in absent)
    found = refit(problem, traces_of(twice, orders)).costs
    assert (found.backward, found.backward_input, found.backward_weight) == (
        (36.0,) * 6,
        (20.0,) * 6,
        (20.0,) * 6,
    )


def test_without_measured_or_planned_fused_backward_b_stays_i_plus_w() -> None:
    costs = {**PLANNED["costs"], "backward": None}
    problem = planned(costs=costs)
    actual = really(problem)
    assert refit(problem, traces_of(actual, orders_of(problem, only_split))).costs.backward is None
    assert refit(problem, traces_of(actual, orders_of(problem))).costs.backward == actual.costs.backward


def test_stages_without_a_trace_stay_as_planned() -> None:
    problem = planned()
    actual = really(problem)
    found = refit(problem, traces_of(actual, orders_of(problem))[1:2]).costs
    for stage, rank in enumerate(problem.placement.rank_of):
        assert found.forward[stage] == (actual if rank == 1 else problem).costs.forward[stage]
    assert found.p2p == problem.costs.p2p


@pytest.mark.parametrize(("unit", "expected"), [("ns", 1000.0), ("ms", 0.001), ("s", 1e-6)])
def test_measured_costs_are_in_the_problem_s_unit(unit: str, expected: float) -> None:
    problem = planned()
    actual = really(problem)
    other = replace(problem, units=Units(unit))
    found = refit(other, traces_of(actual, orders_of(problem)))
    assert found.costs.forward == pytest.approx([expected * f for f in actual.costs.forward])


def test_the_costs_of_a_run_are_not_those_of_the_measured_program() -> None:
    problem = replace(planned(), measured=(("device", "H200"),))
    assert refit(problem, traces_of(really(problem), orders_of(problem))).measured == ()


def test_without_a_known_unit_the_total_work_stays_as_planned() -> None:
    problem = replace(planned(), units=Units(None))
    costs = replace(problem.costs, forward=tuple(7 * f for f in problem.costs.forward))
    slow = replace(problem, costs=costs)
    orders = orders_of(problem)
    found = refit(problem, traces_of(slow, orders))

    def work(one: Problem) -> float:
        return float(one.arrays.durations(orders.stage, orders.letter, orders.microbatch).sum())

    assert work(found) == pytest.approx(work(problem), rel=1e-4)
    assert found.costs.forward[0] / found.costs.backward_input[0] == pytest.approx(7.0, rel=1e-4)


def test_the_largest_change_is_relative_to_the_plan() -> None:
    problem = planned()
    costs = problem.costs
    changed = replace(problem, costs=replace(costs, forward=(*costs.forward[:5], 8.0), p2p=(400.0,) * 5))
    assert largest_change(problem, changed) == pytest.approx(0.2)
    assert largest_change(problem, problem) == 0.0


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        (lambda d: d.pop("plan_id"), "/plan_id"),
        (lambda d: d["steps"][0]["actions"][0].__setitem__(4, 2**64), "/steps/0/actions/0/4"),
        (lambda d: d.update(steps=[d["steps"][0], d["steps"][0]]), "/steps/1/step"),
        (lambda d: d["steps"][0]["actions"][2].__setitem__(0, "0X0"), "/steps/0/actions/2/0"),
        (lambda d: d["steps"][0]["actions"][2].__setitem__(3, -5), "/steps/0/actions/2"),
        (lambda d: d["steps"][0]["actions"][2].pop(), "/steps/0/actions/2"),
    ],
)
def test_an_invalid_trace_is_refused_at_the_broken_key(change: Change, pointer: str) -> None:
    document = trace_documents(planned(), orders_of(planned()))[0]
    change(document)
    with pytest.raises(InvalidInput) as found:
        parse_rank_trace(document)
    assert found.value.issues[0].pointer == pointer


def test_traces_of_another_problem_are_refused() -> None:
    problem = planned()
    traces = traces_of(problem, orders_of(problem))
    for other in (planned(placement="loop"), planned(microbatches=4), planned(pp_degree=2)):
        with pytest.raises(InvalidInput):
            refit(other, traces)
    with pytest.raises(InvalidInput, match="no measured action"):
        refit(problem, [traces[0].only(frozenset())])


def test_the_command_writes_the_measured_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem = planned()
    actual, plan = really(problem), make_plan(problem, orders_of(problem), method="random")
    (tmp_path / "plan.json").write_text(json.dumps(plan_json(plan)))
    paths = []
    for document in trace_documents(actual, plan.orders, plan_id=plan.plan_id):
        paths.append(tmp_path / f"trace-{document['rank']}.json")
        paths[-1].write_text(json.dumps(document))
    names = [str(path) for path in paths]
    assert main(["refit", str(tmp_path / "plan.json"), *names, "-o", str(tmp_path / "out.json")]) == 0
    written = parse_problem(json.loads((tmp_path / "out.json").read_text()))
    assert problem_json(written) == problem_json(refit(problem, traces_of(actual, plan.orders)))
    assert "3 ranks measured" in capsys.readouterr().err
    paths[1].write_text(paths[1].read_text().replace(plan.plan_id, "0" * 64))
    assert main(["refit", str(tmp_path / "plan.json"), *names]) == 2
    assert "/plan_id: found 000000000000; the plan given is" in capsys.readouterr().err


def test_times_are_converted_to_the_clock_of_rank_0() -> None:
    problem = planned()
    (first, *_) = traces_of(problem, orders_of(problem), ahead=[77, 0, 0])
    (again, *_) = traces_of(problem, orders_of(problem))
    assert np.array_equal(first.steps[0].times, again.steps[0].times)
