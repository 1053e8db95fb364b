"""The frontier of layers: every limit has its own cut, and the smallest is one that a cut just fits."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
from support.fake_searches import orders_of
from support.layered import LAYERED, RECOMPUTED
from zbv_solver.commands.cli import main
from zbv_solver.errors import InfeasibleMemory, InvalidInput
from zbv_solver.frontiers.frontier import (
    floor,
    frontier_points,
    layer_limits,
    recomputed_stages,
    smallest_limit,
)
from zbv_solver.frontiers.limits import at_limit
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.cut import Cut
from zbv_solver.problem.layered_problem import AnyProblem, LayeredProblem
from zbv_solver.problem.reading import parse_any_problem
from zbv_solver.search.assemble import make_plan
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search


def layered(document: dict[str, Any] = RECOMPUTED, **changes: Any) -> LayeredProblem:
    question = parse_any_problem({**document, **changes})
    assert isinstance(question, LayeredProblem)
    return question


def quick(problem: AnyProblem) -> Plan:
    return search(problem, SearchOptions("quick"))


def every_need(problem: LayeredProblem) -> list[float]:
    """What the fullest rank needs at least, of every cut and every choice of recomputed stages."""
    found = []
    inner = [int(place) for place in problem.places[1:-1]]
    for placement in problem.placements:
        for places in combinations(inner, placement.n_stages - 1):
            for recompute in product((False, True), repeat=placement.n_stages):
                cut = Cut.at((0, *places, problem.model.n_layers), recompute)
                found.append(max(problem.cut_into(placement, cut).smallest_limit))
    return found


def test_more_memory_never_costs_time_and_recomputes_no_more_than_it_must() -> None:
    problem = layered()
    points = frontier_points(problem, quick)
    assert [point.limit for point in points] == list(layer_limits(problem))
    values = [point.plan.objective for point in points]
    assert values == sorted(values, reverse=True)
    assert values[0] > values[-1]
    for point in points:
        assert point.needs <= point.limit * (1 + 1e-9)
        assert point.lower_bound <= point.plan.objective * (1 + 1e-9)
        assert point.gap == pytest.approx(point.plan.objective / point.lower_bound - 1)
        assert floor(at_limit(problem, point.limit)) <= point.plan.objective * (1 + 1e-9)
    bounds = [point.lower_bound for point in points]
    assert bounds == sorted(bounds, reverse=True)
    assert recomputed_stages(points[0].plan) > 0
    assert recomputed_stages(points[-1].plan) == 0
    cuts = {point.plan.problem.model.partition for point in points if point.plan.problem.model}
    assert len(cuts) > 1, "every limit has its own"


def test_a_plan_of_little_memory_counts_where_more_memory_was_searched_in_vain() -> None:
    plans: list[Plan] = []

    def in_vain(limited: AnyProblem) -> Plan:
        if not plans:
            plans.append(quick(limited))
        else:
            problem = plans[0].problem
            plans.append(make_plan(problem, orders_of(problem), method="one microbatch after the other"))
        return plans[-1]

    points = frontier_points(layered(), in_vain)
    assert plans[1].objective > plans[0].objective
    assert {point.plan.plan_id for point in points} == {plans[0].plan_id}


def test_the_smallest_limit_is_that_of_the_placement_that_needs_least() -> None:
    """Under V the first and the last stage are one rank's."""
    blocks = [{**LAYERED["layers"][1], "repeat": 10}]
    rules = {"first": 3, "last": 3}
    problem = layered(LAYERED, pp_degree=3, placement="auto", layers=blocks, cut=rules)
    assert [each.kind for each in problem.placements] == ["v", "loop", "single"]
    assert smallest_limit(problem) == 4 * 7
    assert smallest_limit(replace(problem, placement="v")) == 6 * 7


@pytest.mark.parametrize("placement", ["v", "single", "loop", "auto"])
@pytest.mark.parametrize("document", [RECOMPUTED, LAYERED])
def test_the_smallest_limit_is_that_of_the_best_of_all_cuts(document: dict[str, Any], placement: str) -> None:
    problem = layered(document, placement=placement, memory={"static": [1, 3], "limit": 7})
    exact = [each for each in problem.placements if each.kind != "loop"]
    wanted = problem if not exact or placement != "auto" else replace(problem, placement="v")
    least = smallest_limit(problem)
    assert least == pytest.approx(min(every_need(wanted)))
    assert layer_limits(problem)[0] == least
    quick(at_limit(problem, least))
    if placement != "auto":  # which may have interleaved stages that need less
        with pytest.raises(InfeasibleMemory):
            quick(at_limit(problem, least * (1 - 1e-6)))


def test_a_bound_of_all_cuts_is_exact_in_the_loads_of_v_and_knows_the_limit() -> None:
    problem = layered(memory={})
    least = smallest_limit(problem)
    plan = quick(at_limit(problem, least))
    assert plan.cut is not None
    assert floor(at_limit(problem, least)) == pytest.approx(plan.cut.lower_bound)
    assert floor(problem) < floor(at_limit(problem, least)), "what is recomputed is work, too"
    auto = layered(memory={}, placement="auto")
    assert floor(auto) <= floor(problem)
    single = layered(memory={}, placement="single")
    assert floor(single) == 4 * 124  # head and two blocks are its heavier stage


def test_layers_that_hold_nothing_have_no_frontier() -> None:
    bare = [{name: value for name, value in layer.items() if name != "memory"} for layer in LAYERED["layers"]]
    with pytest.raises(InvalidInput) as refused:
        layer_limits(layered(LAYERED, layers=bare))
    assert refused.value.issues[0].pointer == "/layers"


def test_the_command_prints_it_as_a_table_and_as_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "layers.json"
    changes: dict[str, Any] = {"microbatches": 2, "placement": "single"}
    path.write_text(json.dumps({**RECOMPUTED, **changes, "memory": {"limit": 1}}))  # which nothing fits
    assert main(["frontier", str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["objective"] == "span"
    points = document["points"]
    assert [point["limit"] for point in points] == pytest.approx(list(layer_limits(layered(**changes))))
    assert all(point["peak_memory"] <= point["limit"] * (1 + 1e-9) for point in points)
    assert (points[0]["placement"], points[0]["chunks"]) == ("single", 1)
    assert points[0]["recomputed"] > points[-1]["recomputed"] == 0
    assert main(["frontier", str(path)]) == 0
    table = capsys.readouterr().out
    assert "cut again" in table
    assert "2 of 2" in table
