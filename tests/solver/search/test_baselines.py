"""Classical schedules of layers have the best cut for their own order, and say which."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from zbv_models.fixed_orders.best_cut import best_cut
from zbv_models.fixed_orders.schedules import torch_schedule
from zbv_solver.construct.baselines import BASELINES, baseline, baseline_names
from zbv_solver.errors import InvalidPlan
from zbv_solver.plans.plan import Baseline, Plan, plan_json
from zbv_solver.problem.cut import Cut
from zbv_solver.problem.layered_problem import LayeredProblem, uncut
from zbv_solver.problem.reading import parse_any_problem
from zbv_solver.problem.writing import problem_json
from zbv_solver.search.assemble import classical, compare
from zbv_solver.search.claims import Claim, check_plan
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search
from zbv_solver.timing.start_times import evaluate


def layer(name: str, times: tuple[float, float, float], **more: Any) -> dict[str, Any]:
    forward, inputs, weights = times
    return {"name": name, "forward": forward, "backward_input": inputs, "backward_weight": weights, **more}


def layered(p: int, m: int, *layers: dict[str, Any], **more: Any) -> LayeredProblem:
    problem = parse_any_problem({"pp_degree": p, "microbatches": m, "layers": layers, **more})
    assert isinstance(problem, LayeredProblem)
    return problem


HELD = {"forward": 2, "backward_input": -1, "backward_weight": -1}
AGAIN = {"backward_input": 4, "memory": {"forward": 0.5, "backward_input": 0.5, "backward_weight": -1}}
HEAVY_HEAD = (
    layer("embedding", (1, 0, 1), memory=HELD),
    layer("block", (2, 2, 1), repeat=14, memory=HELD, recompute=AGAIN),
    layer("head", (10, 10, 5), memory=HELD),
)
"""A head of five blocks, on one rank's share of which nothing else should lie."""
PROBLEMS = {
    # Two kinds of blocks that differ by 0.1 %.
    "two-kinds": layered(
        2,
        16,
        layer("embedding", (0, 0, 0)),
        layer("dense", (10, 10, 10), repeat=4),
        layer("moe", (10.01, 10, 10), repeat=4),
        layer("head", (1, 1, 1)),
    ),
    "heavy-head": layered(4, 8, *HEAVY_HEAD, costs={"p2p": 1}),
    "ample": layered(4, 8, *HEAVY_HEAD, costs={"p2p": 1}, memory={"limit": 200}),
    "tight": layered(4, 8, *HEAVY_HEAD, costs={"p2p": 1}, memory={"limit": 20}),
}


@cache
def plan_of(name: str) -> Plan:
    return search(PROBLEMS[name], SearchOptions("quick"))


def rows_of(name: str) -> dict[str, Baseline]:
    return {row.name: row for row in plan_of(name).baselines}


def test_two_kinds_of_blocks_are_dealt_like_one() -> None:
    """The even cut of Megatron-LM is the answer; the longest run of equal blocks is not all of them."""
    rows = rows_of("two-kinds")
    assert rows["1f1b"].layers_per_stage == (5, 5)
    spans = [rows[name].span for name in ("1f1b", "interleaved-1f1b", "even-cut")]
    assert spans == pytest.approx([2088.64, 1998.33, 1968.32])


@pytest.mark.parametrize("name", ["two-kinds", "heavy-head"])
def test_no_cut_is_better_for_1f1b_and_gpipe(name: str) -> None:
    problem = plan_of(name).problem
    for ours, theirs in (("1f1b", "1F1B"), ("gpipe", "GPipe")):
        schedule = torch_schedule(theirs, problem.pp_degree, problem.microbatches)
        best = best_cut(uncut(problem, schedule.placement), [schedule], effort="quick")
        assert best.is_optimal
        assert rows_of(name)[ours].span == pytest.approx(best.objective)


@pytest.mark.parametrize("name", ["two-kinds", "heavy-head"])
def test_a_baseline_states_its_cut_which_is_no_worse_than_that_of_the_plan(name: str) -> None:
    problem = plan_of(name).problem
    for row in compare(problem):
        recut, orders = classical(row.name, problem)
        assert recut.model is not None
        assert recut.model.cut.bounds == (0, *accumulate(row.layers_per_stage or ()))
        assert row.recompute in (None, recut.model.cut.recompute)
        assert (row.recompute is None) == (name == "two-kinds")
        assert evaluate(recut, orders).span == row.span
        assert row.span <= evaluate(*baseline(row.name, problem)).span * (1 + 1e-9), row.name


def test_with_a_limit_a_cut_that_fits_is_preferred_and_stages_may_be_recomputed() -> None:
    free, tight, gpipe = rows_of("ample")["1f1b"], rows_of("tight")["1f1b"], rows_of("tight")["gpipe"]
    assert (free.fits, tight.fits, any(tight.recompute or ())) == (True, True, True)
    assert max(free.peak_memory) > 20
    assert tight.span > free.span
    # GPipe holds all microbatches; no cut fits, so it has the best cut without the limit.
    assert (gpipe.fits, any(gpipe.recompute or ())) == (False, False)


def test_too_few_layers_for_a_v_have_no_schedules_of_a_v() -> None:
    problem = layered(4, 8, layer("a", (1, 1, 1), repeat=6), placement="single")
    names = baseline_names(search(problem, SearchOptions("quick")).problem)
    assert set(BASELINES) - set(names) == {"interleaved-1f1b", "zb-v", "v-half", "v-min", "dualpipe-v"}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("limit", [None, 5])
def test_one_layer_is_compared_where_stages_may_be_empty(
    ranks: int, layers: int, limit: float | None
) -> None:
    """One layer cannot be both the first and the last stage's."""
    one = layer("a", (2, 1, 2), repeat=layers, memory=HELD)
    problem = layered(ranks, 2, one, cut={"allow_empty": True}, memory={"limit": limit})
    for row in search(problem, SearchOptions("quick")).baselines:
        assert 5.0 * layers <= row.span <= 10.0 * layers
        assert row.layers_per_stage is None or sum(row.layers_per_stage) == layers


def test_claims_about_a_cut_are_checked() -> None:
    document = plan_json(plan_of("heavy-head"))
    at = [row["name"] for row in document["baselines"]].index("1f1b")

    def claim(**changes: Any) -> Claim:
        rows = list(document["baselines"])
        rows[at] = rows[at] | changes
        claims = check_plan(document | {"baselines": rows}).claims
        return next(claim for claim in claims if claim.pointer == f"/baselines/{at}")

    assert claim().is_verified
    assert "that no cut is better for its order was not verified" in claim().reason
    assert not claim(layers_per_stage=None).is_verified
    for layers, says in (
        ([4, 4, 4, 4], "stated span of baseline 1f1b"),
        ([8, 4, 4], "has 3 stages with 16 layers, which the schedule cannot have"),
        ([4, 4, 4, 5], "the problem has 16 layers on 4 ranks"),
    ):
        with pytest.raises(InvalidPlan, match=says):
            claim(layers_per_stage=layers)


def test_transfers_that_block_are_part_of_both_ranks_actions() -> None:
    """As benchmarks/published had it: an F sends its output, a backward its gradient, and both ranks wait."""
    problem = replace(layered(4, 8, *HEAVY_HEAD, costs={"p2p": 1}, placement="single"), blocking=True)
    cuts = [
        replace(problem, blocking=blocking).cut_into(problem.placements[0], Cut.at((0, 5, 9, 13, 16)))
        for blocking in (True, False)
    ]
    assert list(cuts[0].costs.p2p) == [0, 0, 0]
    for name, added in (("forward", [1, 1, 1, 0]), ("backward_input", [0, 1, 1, 1])):
        assert list(np.subtract(*(getattr(cut.costs, name) for cut in cuts))) == added
    orders = torch_schedule("1F1B", 4, 8).orders()
    assert evaluate(cuts[0], orders).span > evaluate(cuts[1], orders).span
    assert parse_any_problem(problem_json(cuts[0])) == cuts[0]
    assert uncut(cuts[0]) == problem
