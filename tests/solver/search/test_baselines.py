"""Classical schedules of layers have the best cut for their own order, and say which."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from zbv_models.fixed_orders.best_cut import best_cut
from zbv_models.fixed_orders.schedules import torch_schedule
from zbv_solver.commands.cli import main
from zbv_solver.construct.baselines import BASELINES, baseline, baseline_names, merge_stages
from zbv_solver.errors import InvalidPlan
from zbv_solver.plans.plan import Plan, plan_json
from zbv_solver.problem.cut import Cut
from zbv_solver.problem.layered_problem import LayeredProblem, uncut
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import load_problem, parse_any_problem
from zbv_solver.problem.writing import problem_json
from zbv_solver.search.assemble import classical, compare
from zbv_solver.search.claims import check_plan
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search
from zbv_solver.timing.start_times import evaluate

QUICK = SearchOptions("quick")


def layer(name: str, times: tuple[float, float, float], **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        **dict(zip(("forward", "backward_input", "backward_weight"), times, strict=True)),
        **more,
    }


# Two kinds of blocks that differ by 0.1 %.
TWO_KINDS = {
    "pp_degree": 2,
    "microbatches": 16,
    "layers": [
        layer("embedding", (0, 0, 0)),
        layer("dense", (10, 10, 10), repeat=4),
        layer("moe", (10.01, 10, 10), repeat=4),
        layer("head", (1, 1, 1)),
    ],
}
HELD = {"forward": 2, "backward_input": -1, "backward_weight": -1}
# A head of five blocks, on one rank's share of which nothing else should lie.
HEAVY_HEAD = {
    "pp_degree": 4,
    "microbatches": 8,
    "layers": [
        layer("embedding", (1, 0, 1), memory=HELD),
        layer(
            "block",
            (2, 2, 1),
            repeat=14,
            memory=HELD,
            recompute={
                "backward_input": 4,
                "memory": {"forward": 0.5, "backward_input": 0.5, "backward_weight": -1},
            },
        ),
        layer("head", (10, 10, 5), memory=HELD),
    ],
    "costs": {"p2p": 1},
}


@cache
def plan_of(name: str) -> Plan:
    return search(layered({"two-kinds": TWO_KINDS, "heavy-head": HEAVY_HEAD}[name]), QUICK)


def layered(document: dict[str, Any], **changes: Any) -> LayeredProblem:
    problem = parse_any_problem(document | changes)
    assert isinstance(problem, LayeredProblem)
    return problem


def test_two_kinds_of_blocks_are_dealt_like_one() -> None:
    """The even cut of Megatron-LM is the answer; the longest run of equal blocks is not all of them."""
    plan = plan_of("two-kinds")
    rows = {row.name: row for row in plan.baselines}
    assert plan.objective == pytest.approx(1968)
    assert rows["1f1b"].span == pytest.approx(2088.64)
    assert rows["1f1b"].layers_per_stage == (5, 5)
    assert rows["interleaved-1f1b"].span == pytest.approx(1998.33)
    assert rows["even-cut"].span == pytest.approx(1968.32)


@pytest.mark.parametrize("name", ["two-kinds", "heavy-head"])
def test_no_cut_is_better_for_1f1b_and_gpipe(name: str) -> None:
    problem = plan_of(name).problem
    rows = {row.name: row for row in compare(problem)}
    for ours, theirs in (("1f1b", "1F1B"), ("gpipe", "GPipe")):
        schedule = torch_schedule(theirs, problem.pp_degree, problem.microbatches)
        best = best_cut(uncut(problem, schedule.placement), [schedule], effort="quick")
        assert best.is_optimal
        assert rows[ours].span == pytest.approx(best.objective)


@pytest.mark.parametrize("name", ["two-kinds", "heavy-head"])
def test_no_schedule_is_worse_than_with_the_plans_own_cut(name: str) -> None:
    problem = plan_of(name).problem
    for row in compare(problem):
        own, orders = baseline(row.name, problem)
        assert row.span <= evaluate(own, orders).span * (1 + 1e-9), row.name


def test_a_baseline_states_the_cut_that_its_times_are_of() -> None:
    problem = plan_of("heavy-head").problem
    for row in compare(problem):
        own, orders = classical(row.name, problem)
        assert own.model is not None
        assert own.model.cut.bounds == (0, *accumulate(row.layers_per_stage or ()))
        assert own.model.cut.recompute == row.recompute
        assert evaluate(own, orders).span == row.span


def limited(limit: float) -> Problem:
    problem = layered(HEAVY_HEAD, memory={"limit": limit})
    return search(problem, QUICK).problem


def test_with_a_limit_a_cut_that_fits_is_preferred_and_stages_may_be_recomputed() -> None:
    free, tight = ({row.name: row for row in compare(limited(limit))} for limit in (200, 20))
    assert free["1f1b"].fits
    assert max(free["1f1b"].peak_memory) > 20
    assert tight["1f1b"].fits
    assert any(tight["1f1b"].recompute or ())
    assert tight["1f1b"].span > free["1f1b"].span
    # GPipe holds all microbatches; no cut fits, so it has the best cut without the limit.
    assert not tight["gpipe"].fits
    assert not any(tight["gpipe"].recompute or ())


def test_unequal_ranks_have_the_best_of_the_usual_cuts() -> None:
    slow = {"old": {"forward": 4, "backward_input": 4, "backward_weight": 2}}
    layers = [layer("block", (2, 2, 1), repeat=12, on=slow)]
    problem = layered(
        {"pp_degree": 2, "microbatches": 8, "devices": ["new", "old"], "layers": layers}, placement="single"
    )
    found = search(problem, QUICK)
    (row,) = [row for row in found.baselines if row.name == "1f1b"]
    assert row.layers_per_stage == (8, 4)


def test_too_few_layers_for_a_v_have_no_schedules_of_a_v() -> None:
    document = {
        "pp_degree": 4,
        "microbatches": 8,
        "placement": "single",
        "layers": [layer("a", (1, 1, 1), repeat=6)],
    }
    names = baseline_names(search(layered(document), QUICK).problem)
    assert set(BASELINES) - set(names) == {"interleaved-1f1b", "zb-v", "v-half", "v-min", "dualpipe-v"}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("limit", [None, 5])
def test_one_layer_is_compared_where_stages_may_be_empty(
    ranks: int, layers: int, limit: float | None
) -> None:
    """One layer cannot be both the first and the last stage's."""
    document = {
        "pp_degree": ranks,
        "microbatches": 2,
        "layers": [layer("a", (2, 1, 2), repeat=layers, memory=HELD)],
        "cut": {"allow_empty": True},
    }
    plan = search(layered(document, memory={"limit": limit}), QUICK)
    serial = 10.0 * layers
    for row in plan.baselines:
        assert 5.0 * layers <= row.span <= serial
        assert row.layers_per_stage is None or sum(row.layers_per_stage) == layers


def test_a_problem_by_stages_keeps_its_stages() -> None:
    problem = replace(plan_of("heavy-head").problem, model=None)
    (row,) = [row for row in compare(problem) if row.name == "1f1b"]
    assert row.layers_per_stage is None
    own, orders = classical("1f1b", problem)
    assert own == merge_stages(problem)
    assert evaluate(own, orders).span == row.span


def test_false_claims_about_a_cut_are_refused() -> None:
    document = plan_json(plan_of("heavy-head"))
    at = next(index for index, row in enumerate(document["baselines"]) if row["name"] == "1f1b")
    checked = check_plan(document)
    (claim,) = [claim for claim in checked.verified if claim.pointer == f"/baselines/{at}"]
    assert "that no cut is better for its order was not verified" in claim.reason

    def changed(**keys: Any) -> dict[str, Any]:
        rows = list(document["baselines"])
        rows[at] = rows[at] | keys
        return document | {"baselines": rows}

    with pytest.raises(InvalidPlan, match="stated span of baseline 1f1b"):
        check_plan(changed(layers_per_stage=[4, 4, 4, 4]))
    with pytest.raises(InvalidPlan, match="has 3 stages with 16 layers, which the schedule cannot have"):
        check_plan(changed(layers_per_stage=[8, 4, 4]))
    with pytest.raises(InvalidPlan, match="the problem has 16 layers on 4 ranks"):
        check_plan(changed(layers_per_stage=[4, 4, 4, 5]))
    unstated = check_plan(changed(layers_per_stage=None))
    assert "not stated" in next(
        each.reason for each in unstated.unverified if each.pointer == f"/baselines/{at}"
    )


def test_transfers_that_block_are_part_of_both_ranks_actions() -> None:
    """As benchmarks/published had it: an F sends its output, a backward its gradient, and both ranks wait."""
    problem = replace(layered(HEAVY_HEAD, placement="single"), blocking=True)
    (placement,) = problem.placements
    cut = problem.cut_into(placement, Cut.at((0, 5, 9, 13, 16)))
    plain = replace(problem, blocking=False).cut_into(placement, Cut.at((0, 5, 9, 13, 16)))
    assert list(cut.costs.p2p) == [0, 0, 0]
    assert [a - b for a, b in zip(cut.costs.forward, plain.costs.forward, strict=True)] == [1, 1, 1, 0]
    assert [a - b for a, b in zip(cut.costs.backward_input, plain.costs.backward_input, strict=True)] == [
        0,
        1,
        1,
        1,
    ]
    orders = torch_schedule("1F1B", 4, 8).orders()
    assert evaluate(cut, orders).span > evaluate(plain, orders).span
    assert parse_any_problem(problem_json(cut)) == cut
    assert uncut(cut) == problem


def test_1f1b_of_llama_has_the_best_cut_for_its_own_order(tmp_path: Path) -> None:
    """With the cut of the plan's V, its ratio to the plan would be 1.275."""
    path = tmp_path / "llama.json"
    of = ["--pp-degree", "4", "--microbatches", "16", "--placement", "v"]
    assert main(["estimate", "--preset", "llama-3.1-8b", *of, "-o", str(path)]) == 0
    problem = load_problem(path)
    assert isinstance(problem, LayeredProblem)
    plan = search(problem, QUICK)
    row = next(row for row in plan.baselines if row.name == "1f1b")
    schedule = torch_schedule("1F1B", 4, 16)
    best = best_cut(uncut(plan.problem, schedule.placement), [schedule], recompute="uniform", effort="quick")
    assert row.fits
    assert row.span <= best.least * 1.005
    assert row.span / plan.objective < 1.178
