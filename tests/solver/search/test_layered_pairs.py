"""Layers whose forwards may run together with backwards: documents, bounds over all cuts, and plans."""

from __future__ import annotations

import json
from copy import deepcopy
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.layered import layered_problem
from zbv_solver.construct.pairs import joined, starts
from zbv_solver.errors import InvalidInput
from zbv_solver.export.report.figures import cards_of
from zbv_solver.export.timeline import pair_savings
from zbv_solver.plans.plan import Plan, plan_json
from zbv_solver.plans.reading import parse_plan
from zbv_solver.problem.cut import Cut
from zbv_solver.problem.layered_problem import LayeredProblem, uncut
from zbv_solver.problem.reading import parse_any_problem
from zbv_solver.problem.writing import any_problem_json
from zbv_solver.search.assemble import classical
from zbv_solver.search.layered import bound_over_all_cuts, first_plan, plan_layers
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import Search
from zbv_solver.timing.start_times import evaluate, objective_of

HIDDEN = {"forward": 6, "backward_input": 6, "backward": 6}
MOE: dict[str, Any] = {
    **{"name": "moe", "repeat": 6, "forward": 14, "backward_input": 15, "backward_weight": 4},
    **{"output_bytes": 100, "communication": HIDDEN},
}
DOCUMENT: dict[str, Any] = {
    "pp_degree": 2,
    "microbatches": 8,
    "placement": "v",
    "layers": [
        {"name": "dense", "repeat": 2, "forward": 10, "backward_input": 11, "backward_weight": 8},
        MOE,
        {"name": "head", "forward": 9, "backward_input": 9, "backward_weight": 9},
    ],
    "costs": {"link": {"latency": 1, "bandwidth": 100}, "pair_factor": 1.1},
}


def changed(**moe: Any) -> dict[str, Any]:
    """The document with other values of its layers with experts."""
    document = deepcopy(DOCUMENT)
    document["layers"][1] |= moe
    return document


def test_documents_of_layers_and_of_their_plans_say_what_pairs_hide() -> None:
    problem = layered_problem(DOCUMENT)
    assert layered_problem(json.loads(json.dumps(any_problem_json(problem)))) == problem
    cut: Any = problem.cut_into(problem.placements[0], Cut.at((0, 1, 4, 7, 9)))
    assert list(cut.communication.forward) == [0, 12, 18, 6]  # dense layers and the head hide nothing
    assert cut.pair_factor == 1.1
    document = any_problem_json(cut)
    assert parse_any_problem(document) == cut
    assert uncut(cut) == problem
    document["costs"]["communication"]["forward"] = [1, 12, 18, 6]
    with pytest.raises(InvalidInput, match="the layers of the partition give") as error:
        parse_any_problem(document)
    assert error.value.issues[0].pointer == "/costs/communication/forward"


def test_layers_without_communication_have_no_pairs_and_the_same_document_as_before() -> None:
    document = changed()
    del document["layers"][1]["communication"]
    problem = layered_problem(document)
    assert (problem.has_pairs, problem.pair_factor) == (False, 1.0)
    assert problem.with_communication_hidden() is problem
    text = json.dumps(any_problem_json(problem))
    assert "communication" not in text
    assert "pair_factor" not in text
    assert problem.cut_into(problem.placements[0], Cut.at((0, 1, 4, 7, 9))).communication is None


FEW_PHASES = SearchOptions("quick", without=("tune", "inject", "overtake", "windows", "exact"))
SHARES = st.sampled_from([0.0, 0.2, 0.45, 0.7, 1.0])
TIMES = st.integers(1, 9)


@st.composite
def problems(draw: st.DrawFn) -> LayeredProblem:
    """Five layers that differ, on two ranks."""

    def layer(number: int) -> dict[str, Any]:
        forward, inputs, weights = draw(st.tuples(TIMES, TIMES, TIMES))
        f, i, b = draw(st.tuples(SHARES, SHARES, SHARES))
        costs = {"forward": forward, "backward_input": inputs, "backward_weight": weights}
        whole = {"backward": inputs + weights - 1} if draw(st.booleans()) else {}
        fused = whole.get("backward", inputs + weights)
        hidden = {"forward": f * forward, "backward_input": i * inputs, "backward": b * fused}
        return {"name": f"layer.{number}", **costs, **whole, "communication": hidden}

    return layered_problem(
        {
            **{"pp_degree": 2, "microbatches": draw(st.integers(4, 6))},
            "placement": draw(st.sampled_from(["v", "single", "loop"])),
            "objective": draw(st.sampled_from(["span", "makespan"])),
            "layers": [layer(number) for number in range(5)],
            "costs": {"p2p": draw(st.integers(0, 2)), "pair_factor": draw(st.sampled_from([1.0, 1.1, 1.6]))},
        }
    )


def cuts(problem: LayeredProblem) -> list[Cut]:
    stages = problem.placements[0].n_stages
    return [Cut.at((0, *inner, 5)) for inner in combinations(range(1, 5), stages - 1)]


@settings(max_examples=25, deadline=None)
@given(problems(), st.data())
def test_no_order_with_pairs_is_shorter_than_with_all_communication_hidden(
    problem: LayeredProblem, data: st.DataObject
) -> None:
    cut, placement = data.draw(st.sampled_from(cuts(problem))), problem.placements[0]
    given = problem.cut_into(placement, cut)
    hidden = problem.with_communication_hidden().cut_into(placement, cut)
    assert hidden.communication is None
    for _, orders in starts(given):
        paired = joined(given, orders)
        assert objective_of(hidden, paired.without_pairs()) <= objective_of(given, paired) * (1 + 1e-9)


@settings(max_examples=6, deadline=None)
@given(problems())
def test_the_bound_over_all_cuts_is_below_the_plan_of_every_cut(problem: LayeredProblem) -> None:
    bound, placement = bound_over_all_cuts(problem), problem.placements[0]
    for cut in cuts(problem):
        of_cut = Search(problem.cut_into(placement, cut), FEW_PHASES)
        of_cut.run()
        assert bound <= of_cut.plan().objective * (1 + 1e-9)
    assert bound <= first_plan(problem).objective * (1 + 1e-9)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_layers(layered_problem(DOCUMENT), SearchOptions("quick"))


def test_a_plan_of_layers_has_pairs_and_is_shorter_than_without(plan: Plan) -> None:
    document = changed()
    del document["layers"][1]["communication"]
    alone = plan_layers(layered_problem(document), FEW_PHASES)
    assert plan.objective < 0.95 * alone.objective
    assert plan.cut is not None
    assert plan.cut.lower_bound <= plan.objective
    assert parse_plan(json.loads(json.dumps(plan_json(plan)))).orders.all_text() == plan.orders.all_text()


def test_baselines_of_layers_have_pairs_and_the_cut_that_suits_these(plan: Plan) -> None:
    rows = {row.name: row for row in plan.baselines}
    assert {"dualpipe-v", "1f1b-overlap"} <= set(rows)
    problem, orders = classical("dualpipe-v", plan.problem)
    assert orders.paired is not None
    assert orders.paired.any()
    timing = evaluate(problem, orders)
    assert timing.span == pytest.approx(rows["dualpipe-v"].span)
    assert timing.span < evaluate(problem, orders.without_pairs()).span
    assert plan.objective <= rows["dualpipe-v"].span * (1 + 1e-9)


def test_what_pairs_save_is_the_difference_to_the_same_order_without_them(plan: Plan) -> None:
    found = pair_savings(plan)
    assert found is not None
    assert plan.orders.paired is not None
    forwards = plan.problem.n_stages * plan.problem.microbatches
    assert (found.paired, found.forwards) == (plan.orders.paired.sum(), forwards)
    alone = evaluate(plan.problem, plan.orders.without_pairs())
    assert found.alone == pytest.approx(alone.span)
    assert found.saved == pytest.approx(alone.span - plan.metrics.span)
    assert found.saved > 0
    assert f"{found.paired} of {forwards} forwards" in found.text(plan.problem.units)
    cards = {card.label: card.value for card in cards_of(plan)}
    assert cards["Pairs"] == f"{found.paired} of {forwards}"
