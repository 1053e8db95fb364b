"""Checks, estimates, comparisons and packings over HTTP, which store nothing; quick plans of layers."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from support.layered import LAYERED, RECOMPUTED, layered_problem
from support.serving import PROBLEM, Service, Serving
from support.worst_bodies import COSTS, WEIGHTS
from zbv_service.problems.estimate import read_estimated
from zbv_service.problems.sketch import sketch
from zbv_solver.bounds import lower_bound
from zbv_solver.documents.files import plain
from zbv_solver.errors import InfeasibleMemory
from zbv_solver.frontiers.frontier import floor
from zbv_solver.plans.plan import plan_json
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.assemble import baseline_plan, compare
from zbv_solver.verify.verifier import verify

UNLIMITED = {**PROBLEM, "memory": {**PROBLEM["memory"], "limit": None}}


async def ask(service: Service, what: str, **body: Any) -> httpx.Response:
    """POST a question: check, estimate, compare or pack."""
    return await service.http.post(f"/v1/problems/{what}", json=body)


async def checked(service: Service, body: Any) -> dict[str, Any]:
    answer = await service.http.post("/v1/problems/check", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    assert found["is_valid"] == (found["issues"] == []) == (found["facts"] is not None)
    return found


async def test_a_check_lists_the_rules_for_which_a_search_would_be_refused(honest: Service) -> None:
    bodies: list[Any] = [
        {"problem": {**PROBLEM, "pp_degree": "two", "microbatches": 0}},
        {"problem": {**PROBLEM, "costs": {**PROBLEM["costs"], "forward": -1, "p2p": [1, 2]}}},
        {"problem": {**PROBLEM, "colour": "red"}, "options": {"effort": "most"}},
        {"problem": {**PROBLEM, "microbatches": 10_000}},  # more than this honest accepts
        {"problem": PROBLEM, "options": {"time_limit": 1e9}},
        {"problem": {**PROBLEM, "memory": {**PROBLEM["memory"], "backward_weight": -1}}},
        {"problem": {**PROBLEM, "units": {"time": "a\0b"}}},
        {"options": {}},
        [],
        7,
    ]
    for body in bodies:
        refused = await honest.http.post("/v1/searches", json=body)
        assert refused.status_code == 422
        said = [{"pointer": "", **entry} for entry in refused.json()["errors"]]
        assert (await checked(honest, body))["issues"] == said
    assert await honest.listed("searches") == []


async def test_a_check_of_a_valid_problem_derives_facts(honest: Service) -> None:
    facts = (await checked(honest, {"problem": PROBLEM, "options": {"effort": "quick"}}))["facts"]
    assert facts == {
        **{"stages": 4, "actions": 48, "limit": [8, 8], "limit_fraction": 2, "smallest_limit": [2, 2]},
        **{"smallest_fraction": 0.5, "fits": True, "one_f_one_b_memory": 4, "busy": [24, 24]},
    }
    tight = {**PROBLEM, "memory": {**PROBLEM["memory"], "limit": [8, 1]}}
    facts = (await checked(honest, {"problem": tight}))["facts"]
    assert (facts["fits"], facts["limit_fraction"]) == (False, 0.25)


async def test_a_limit_may_be_a_fraction_of_the_memory_of_1f1b(honest: Service) -> None:
    static = {**UNLIMITED, "memory": {**UNLIMITED["memory"], "static": [1, 3]}}
    for fraction, limit, stated in (({"limit_fraction": 0.75}, [4, 6], 0.75), ({}, None, None)):
        facts = (await checked(honest, {"problem": static, **fraction}))["facts"]
        assert (facts["limit"], facts["limit_fraction"], facts["fits"]) == (limit, stated, True)
    large = {**UNLIMITED, "memory": {"forward": 5e14, "backward_input": -5e14, "backward_weight": 0}}
    for problem, wrong in (
        (PROBLEM, 1),  # two limits
        ({**PROBLEM, "memory": None}, 1),
        (UNLIMITED, 0),
        (UNLIMITED, "half"),
        (large, 1000),
    ):
        (issue,) = (await checked(honest, {"problem": problem, "limit_fraction": wrong}))["issues"]
        assert issue["pointer"] == "/limit_fraction", issue
    every = {"problem": {**UNLIMITED, "microbatches": 0}, "limit_fraction": -1, "options": {"seed": "a"}}
    pointers = [issue["pointer"] for issue in (await checked(honest, every))["issues"]]
    assert pointers == ["/problem/microbatches", "/options/seed", "/limit_fraction"]


async def test_an_estimate_is_a_verified_plan_that_is_not_stored(honest: Service) -> None:
    found, problem = (await ask(honest, "estimate", problem=PROBLEM)).json(), parse_problem(PROBLEM)
    assert found["problem_summary"]["microbatches"] == 4
    assert found["baselines"] == [plain(each) for each in compare(problem)]
    plan = found["plan"]
    assert lower_bound(problem).value <= found["lower_bound"] <= plan["span"]
    assert plan["span"] <= min(each["span"] for each in found["baselines"])
    assert plan["gap"] == pytest.approx(plan["span"] / found["lower_bound"] - 1)
    assert all(peak <= 8 for peak in plan["peak_memory"])
    assert [await honest.listed(kind) for kind in ("searches", "plans")] == [[], []]


async def test_an_estimate_of_a_large_problem_has_no_plan(serving: Serving) -> None:
    large = {**UNLIMITED, "pp_degree": 1, "microbatches": 131_073, "placement": "single"}
    async with serving("honest", max_cells=200_000) as service:
        found = (await ask(service, "estimate", problem=large)).json()
        assert (found["plan"], len(found["baselines"])) == (None, 5)


def test_an_estimate_of_many_layers_on_many_kinds_of_devices_is_only_a_bound() -> None:
    on = {f"d{kind}": {"forward": 1 + kind} for kind in range(8)}
    layer = {**COSTS, "memory": WEIGHTS, "on": on}
    document: dict[str, Any] = {
        "pp_degree": 16,
        "microbatches": 32,
        "placement": "auto",
        "layers": [{**layer, "name": f"l{number}"} for number in range(512)],
        "devices": [f"d{rank % 8}" for rank in range(16)],
    }
    asked, make = read_estimated(524_288, {"problem": document})
    estimate = make(asked.packed)
    assert estimate["plan"] is None
    assert estimate["lower_bound"] > 0


async def test_a_problem_that_cannot_be_estimated_is_refused(honest: Service) -> None:
    for wrong, kind, pointer in (
        ({"pp_degree": 512, "microbatches": 1, "placement": "loop", "chunks": 33, "memory": None},
         "invalid-body", "/problem/chunks"),
        ({"microbatches": 131_073}, "invalid-body", "/problem/microbatches"),
        ({"memory": {**PROBLEM["memory"], "limit": [8, 1]}}, "infeasible-memory", "/problem/memory/limit"),
        ({"costs": 1}, "invalid-body", "/problem/costs"),
    ):  # fmt: skip
        answer = await ask(honest, "estimate", problem={**PROBLEM, **wrong})
        assert (answer.status_code, answer.json()["type"]) == (422, f"/errors/{kind}")
        assert answer.json()["errors"][0]["pointer"] == pointer


async def test_a_plan_is_checked_against_the_problem_and_its_claims_are_listed(honest: Service) -> None:
    plan = json.loads(json.dumps(plan_json(baseline_plan("zb-h1", parse_problem(PROBLEM)))))
    problem = plan["problem"]
    right = (await checked(honest, {"problem": problem, "plan": plan}))["plan"]
    other = (await checked(honest, {"problem": PROBLEM, "plan": plan}))["plan"]
    metrics = plan["metrics"] | {"makespan": 1}
    false = (await checked(honest, {"problem": problem, "plan": plan | {"metrics": metrics}}))["plan"]
    shapeless = (await checked(honest, {"problem": problem, "plan": 7}))["plan"]
    verified = {claim["pointer"]: claim["is_verified"] for claim in right["claims"]}
    assert right["is_valid"]
    assert verified["/ranks"]
    assert verified["/metrics/span"]
    assert not verified["/metrics/lower_bound"]
    for wrong, pointer, says in (
        (other, "/plan/problem", "made for another problem"),
        (false, "/plan", "the stated makespan 1 is"),
        (shapeless, "/plan", ""),
    ):
        assert not wrong["is_valid"]
        assert wrong["claims"] == []
        assert wrong["issues"][0]["pointer"] == pointer
        assert says in wrong["issues"][0]["detail"]


async def test_a_comparison_has_all_baselines_and_the_best_stored_plan(honest: Service) -> None:
    before = (await ask(honest, "compare", problem=PROBLEM)).json()
    assert before["baselines"] == [plain(found) for found in compare(parse_problem(PROBLEM))]
    assert before["problem_summary"]["pp_degree"] == 2
    assert 0 < before["lower_bound"] <= min(row["span"] for row in before["baselines"])
    assert before["best"] is None
    assert [await honest.listed(kind) for kind in ("searches", "plans")] == [[], []]

    ended = await honest.done()
    after = (await ask(honest, "compare", problem={**PROBLEM, "placement": "v", "objective": "span"})).json()
    assert (after["best"]["plan_id"], after["best"]["value"]) == (ended["plan_id"], ended["objective"])
    assert after["baselines"] == before["baselines"]
    assert after["lower_bound"] >= before["lower_bound"]
    other = (await ask(honest, "compare", problem={**PROBLEM, "microbatches": 5})).json()
    assert other["best"] is None

    # A limit that nothing fits is not an error here: `fits` is false for every baseline.
    tight = {**PROBLEM, "memory": {**PROBLEM["memory"], "limit": 1}}
    answer = await ask(honest, "compare", problem=tight)
    assert {row["fits"] for row in answer.json()["baselines"]} == {False}
    single = {**PROBLEM, "placement": "single"}
    merged = {row["name"] for row in (await ask(honest, "compare", problem=single)).json()["baselines"]}
    assert {row["name"] for row in before["baselines"]} - merged == {"zb-v", "v-half", "v-min", "dualpipe-v"}


PIPELINE: dict[str, Any] = {
    "pp_degree": 2,
    "costs": {"forward": {"tokens": 1}, "backward_input": {"tokens": 1}, "backward_weight": {"tokens": 1}},
    "memory": {"forward": {"tokens": 1}, "backward_input": 0, "backward_weight": {"tokens": -1}, "limit": 40},
}
BATCH: dict[str, Any] = {"sequences": [5, 9, 2, 7, 1], "max_tokens": 10, "replicas": 2, "problem": PIPELINE}


async def test_a_packing_has_the_problem_of_every_replica(honest: Service) -> None:
    answer = await ask(honest, "pack", batch=BATCH)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["lower_bound"] <= found["step_time"] == max(r["step_time"] for r in found["replicas"])
    assert found["baselines"][0]["name"] == "equal-tokens"
    indices = [i for r in found["replicas"] for contents in r["microbatches"] for i in contents]
    assert sorted(indices) == [0, 1, 2, 3, 4]
    for replica in found["replicas"]:
        lengths = [[BATCH["sequences"][i] for i in contents] for contents in replica["microbatches"]]
        assert replica["sequences"] == lengths
        assert replica["problem"]["features"]["tokens"] == [*map(sum, lengths)]
        body = {"problem": replica["problem"]}
        assert (await honest.http.post("/v1/problems/check", json=body)).json()["is_valid"]
    assert [await honest.listed(kind) for kind in ("searches", "plans")] == [[], []]


async def test_a_batch_that_cannot_be_packed_is_refused(honest: Service) -> None:
    for change, pointer in (
        ({"max_tokens": 8}, "/batch/sequences/1"),
        ({"replicas": 6}, "/batch/replicas"),
        ({"replicas": 65}, "/batch/replicas"),
        ({"sequences": [1] * 2049}, "/batch/sequences"),
        ({"sequences": [1] * 2048, "problem": {**PIPELINE, "pp_degree": 17}}, "/batch/sequences"),
        ({"problem": {**PIPELINE, "microbatches": 2}}, "/batch/problem/microbatches"),
        ({"problem": {**PIPELINE, "pp_degree": 0}}, "/batch/problem/pp_degree"),
        ({"more": 1}, "/batch/more"),
    ):
        answer = await ask(honest, "pack", batch={**BATCH, **change})
        assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, pointer), change
    tight = {**PIPELINE, "memory": {**PIPELINE["memory"], "limit": 9}}
    answer = await ask(honest, "pack", batch={**BATCH, "problem": tight})
    assert (answer.status_code, answer.json()["type"]) == (422, "/errors/infeasible-memory")
    assert answer.json()["errors"][0]["pointer"] == "/batch/problem/memory/limit"
    assert (await ask(honest, "pack", batch=PROBLEM)).status_code == 422


SECONDS = 60.0
"""Far more than these small problems need."""


@pytest.mark.parametrize("placement", ["v", "loop", "single", "auto"])
def test_a_sketch_is_a_verified_plan_with_simple_cuts_as_baselines(placement: str) -> None:
    problem = layered_problem(LAYERED, placement=placement)
    plan = sketch(problem, SECONDS)
    verify(plan)
    assert plan.problem.placement == problem.placements[0]
    assert floor(problem) <= plan.objective
    named = {each.name: each for each in plan.baselines}
    assert {"1f1b", "even-cut", "histogram-cut"} <= set(named)
    assert plan.objective <= min(named["even-cut"].span, named["histogram-cut"].span)
    # In the even cut, the stage with the head has as many blocks as the other stages.
    assert named["even-cut"].span > plan.objective
    assert named["even-cut"].fits


def test_stages_are_recomputed_to_fit_and_a_simple_cut_is_marked_as_not_fitting() -> None:
    plan: Any = sketch(layered_problem(RECOMPUTED, memory={"limit": 20}), SECONDS)
    assert any(plan.problem.model.cut.recompute)
    assert max(plan.metrics.peak_memory) <= 20 * (1 + 1e-9)
    (histogram,) = (each for each in plan.baselines if each.name == "histogram-cut")
    assert not histogram.fits
    assert max(histogram.peak_memory) > 20


def test_another_placement_is_used_if_v_does_not_fit() -> None:
    """With V, the first and the last stage are on the same rank."""
    blocks = [{**LAYERED["layers"][1], "repeat": 8}]
    document = {**LAYERED, "placement": "auto", "layers": blocks, "cut": {"first": 3, "last": 3}}
    plan = sketch(layered_problem(document, memory={"limit": 30}), SECONDS)
    assert (plan.problem.placement.kind, plan.problem.placement.chunks) == ("loop", 2)
    assert max(plan.metrics.peak_memory) <= 30 * (1 + 1e-9)
    with pytest.raises(InfeasibleMemory) as error:
        sketch(layered_problem(document, memory={"limit": 20}), SECONDS)
    assert min(error.value.smallest) > 0


def test_with_little_memory_a_sketch_is_much_better_than_simple_cuts() -> None:
    """The first cut that fits has one microbatch in flight; more recomputation fills the pipeline."""
    blocks = [{**RECOMPUTED["layers"][1], "repeat": 10}]
    tight = {"pp_degree": 4, "microbatches": 6, "layers": blocks, "cut": {}, "memory": {"limit": 24}}
    plan = sketch(layered_problem(RECOMPUTED, **tight), SECONDS)
    simple = [each for each in plan.baselines if each.name in ("even-cut", "histogram-cut")]
    assert all(each.fits and plan.objective <= 0.75 * each.span for each in simple)
