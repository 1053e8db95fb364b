"""Layers whose activations may be copied to the host: documents, bounds over all cuts, and plans."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import zbv_solver as zbv
from hypothesis import given, settings
from hypothesis import strategies as st
from support.layered import layered_problem
from zbv_solver.errors import InfeasibleMemory, InvalidInput
from zbv_solver.plans.plan import plan_json
from zbv_solver.plans.reading import parse_plan
from zbv_solver.problem.cut import Cut
from zbv_solver.problem.layered_problem import LayeredProblem, uncut
from zbv_solver.problem.reading import parse_any_problem
from zbv_solver.problem.writing import any_problem_json
from zbv_solver.search.incumbent import Progress
from zbv_solver.search.layered import bound_over_all_cuts, first_plan, plan_layers
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search

QUICK = SearchOptions("quick")
BLOCK: dict[str, Any] = {
    **{"name": "block", "repeat": 8, "forward": 10, "backward_input": 11, "backward_weight": 9},
    "memory": {"forward": 4, "backward_input": -1, "backward_weight": -3, "static": 5, "workspace": 1},
    "output_bytes": 2,
}
DOCUMENT: dict[str, Any] = {
    "pp_degree": 2,
    "microbatches": 8,
    "layers": [BLOCK],
    "costs": {"host_link": {"latency": 1, "bandwidth": 1}},
    "memory": {"limit": 44},
}
"""Of 44, 21 are taken: there is room for the F's of one microbatch and a half; 1F1B has two in flight."""


def changed(**sections: dict[str, Any]) -> dict[str, Any]:
    document = deepcopy(DOCUMENT)
    for name, values in sections.items():
        document[name] |= values
    return document


def test_documents_of_layers_and_of_their_plans_say_what_copies_take() -> None:
    problem = layered_problem(changed(memory={"host_limit": 50}))
    assert layered_problem(json.loads(json.dumps(any_problem_json(problem)))) == problem
    cut: Any = problem.cut_into(problem.placements[0], Cut.at((0, 1, 4, 6, 8)))
    assert list(cut.copies.offloadable) == [4, 12, 8, 8]
    assert list(cut.copies.offload) == list(cut.copies.reload) == [5, 13, 9, 9]
    assert list(cut.copies.host_limit or ()) == [50, 50]
    document = any_problem_json(cut)
    assert parse_any_problem(document) == cut
    assert uncut(cut) == problem
    document["costs"]["offload"] = [4, 13, 9, 9]
    with pytest.raises(InvalidInput, match="the layers of the partition give") as error:
        parse_any_problem(document)
    assert error.value.issues[0].pointer == "/costs/offload"


def test_copies_shorten_the_best_plan_of_layers_and_keep_the_limits() -> None:
    problem = layered_problem(DOCUMENT)
    alone = plan_layers(replace(problem, host=None), QUICK)
    copied: Any = plan_layers(problem, QUICK)
    assert copied.objective < 0.97 * alone.objective
    assert copied.orders.copies is not None
    assert max(copied.metrics.peak_memory) <= 44
    assert bound_over_all_cuts(problem) <= copied.cut.lower_bound <= copied.objective
    again = parse_plan(json.loads(json.dumps(plan_json(copied))))
    assert replace(again, provenance=copied.provenance) == copied
    zbv.check(plan_json(copied), problem)


@pytest.mark.parametrize("p", [4, 8])
@pytest.mark.parametrize("limit", [38, 41, 45])
def test_a_first_plan_knows_what_copies_free(p: int, limit: int) -> None:
    """29 of the limit are taken, and 16 are what the F's of one microbatch keep; 1F1B has p in flight."""
    document = changed(memory={"limit": limit}) | {"pp_degree": p, "microbatches": 4 * p}
    tight = layered_problem(document | {"layers": [BLOCK | {"repeat": 4 * p}]})
    assert first_plan(tight).objective <= 1.25 * first_plan(replace(tight, limit=None)).objective


def test_a_plan_of_layers_is_resumed_with_its_copies_and_reported() -> None:
    problem, reports = layered_problem(DOCUMENT), list[Progress]()
    first = first_plan(problem)
    again = plan_layers(problem, QUICK, reports.append, incumbent=first)
    assert again.objective <= first.objective
    assert [each.objective for each in reports] == sorted((each.objective for each in reports), reverse=True)
    bound = bound_over_all_cuts(problem)
    assert {each.lower_bound for each in reports} <= {bound}
    cancelled = plan_layers(problem, QUICK, cancelled=lambda: True, incumbent=first)
    assert cancelled.objective <= first.objective


def test_layers_that_fit_only_with_copies_are_planned_and_others_refused() -> None:
    tight = layered_problem(changed(memory={"limit": 35}))  # an F of all stages of a rank needs 37
    with pytest.raises(InfeasibleMemory):
        plan_layers(replace(tight, host=None), QUICK)
    for plan in (first_plan(tight), plan_layers(tight, QUICK)):
        assert max(plan.metrics.peak_memory) <= 35
    too_tight = layered_problem(changed(memory={"limit": 22}))
    for refused in (first_plan, plan_layers):
        with pytest.raises(InfeasibleMemory, match="the forward of one stage"):
            refused(too_tight)


def test_many_small_stages_fit_where_a_rank_has_room_for_one_of_them() -> None:
    document = changed(memory={"limit": 25}) | {"placement": "loop", "chunks": 4}
    looped = layered_problem(document)  # 20 of states, 1 of workspace and 4 of an F, of four stages
    for plan in (first_plan(looped), plan_layers(looped, QUICK)):
        assert max(plan.metrics.peak_memory) <= 25


def test_without_a_limit_nothing_is_copied() -> None:
    assert plan_layers(layered_problem(changed(memory={"limit": None})), QUICK).orders.copies is None


@st.composite
def problems(draw: st.DrawFn) -> LayeredProblem:
    count = draw(st.integers(4, 6))
    layers = []
    for number in range(count):
        held = draw(st.integers(0, 6))
        inputs = draw(st.integers(-held, 2))
        memory = {"forward": held, "backward_input": inputs, "backward_weight": -held - inputs}
        memory |= {"static": draw(st.integers(0, 3)), "workspace": draw(st.integers(0, 3))}
        times = {key: draw(st.integers(1, 9)) for key in ("forward", "backward_input", "backward_weight")}
        layers.append({"name": f"layer {number}", **times, "memory": memory})
    document = {
        **{"pp_degree": 2, "microbatches": draw(st.integers(2, 4)), "layers": layers},
        "costs": {"host_link": {"latency": draw(st.integers(0, 2)), "bandwidth": draw(st.integers(1, 4))}},
        "memory": {"limit": draw(st.integers(8, 30))},
    }
    return layered_problem(document)


@settings(max_examples=6)
@given(problems())
def test_no_plan_of_any_cut_is_shorter_than_the_bound_over_all_cuts(problem: LayeredProblem) -> None:
    try:
        plan = first_plan(problem)
    except InfeasibleMemory:
        return
    bound = bound_over_all_cuts(problem) * (1 - 1e-9)
    assert bound <= plan.objective
    (placement,) = problem.placements
    for inner in list(combinations(range(1, problem.model.n_layers), placement.n_stages - 1))[:2]:
        try:
            cut = problem.cut_into(placement, Cut.at((0, *inner, problem.model.n_layers)))
            assert search(cut, QUICK).objective >= bound
        except InfeasibleMemory:
            continue


def test_planning_copies_ends_where_a_w_waits_behind_another_one() -> None:
    times = np.array(
        [
            *([4, 6, 3, 2], [4, 6, 2, 2], [1, 6, 3, 2], [5, 4, 3, 1], [1, 4, 1, 3], [5, 2, 1, 1]),
            *([3, 5, 3, 2], [4, 1, 3, 2], [4, 1, 2, 1], [5, 3, 2, 3], [6, 5, 1, 2], [3, 3, 2, 3]),
        ]
    )
    names = ("forward", "backward_input", "backward_weight")
    layers: list[dict[str, Any]] = []
    for *durations, held in times.tolist():
        memory = {"forward": held, "backward_input": -held / 2, "backward_weight": -held / 2, "static": 1}
        costs = dict(zip(names, durations, strict=True))
        layers.append({"name": f"layer {len(layers)}", **costs, "memory": memory})
    looped = {"placement": "loop", "chunks": 3, "layers": layers, "memory": {"limit": 30}}
    problem = layered_problem(
        {**DOCUMENT, **looped, "costs": {"p2p": 0.1, "host_link": {"latency": 0.1, "bandwidth": 0.05}}}
    )
    assert max(first_plan(problem).metrics.peak_memory) <= 30
