"""Searches of layers: cut, placed and ordered together; stored and resumed like any other search."""

from __future__ import annotations

from typing import Any

import pytest
from support.layered import LAYERED, NAMES, RECOMPUTED
from support.serving import Service, Serving
from zbv_service.client.answers import read_plan, read_rank
from zbv_solver.plans.plan import gap_of


async def post(service: Service, what: str, problem: Any, **more: Any) -> Any:
    """The answer to a question about a problem: check, estimate or compare."""
    return (await service.http.post(f"/v1/problems/{what}", json={"problem": problem, **more})).json()


async def test_layers_are_cut_and_the_plan_and_its_ranks_show_the_cut(serving: Serving) -> None:
    async with serving("solver") as service:
        ended = await service.done(RECOMPUTED, effort="quick")
        summary = ended["problem_summary"]
        assert (summary["layers"], summary["placement"], summary["pp_degree"]) == (8, "v", 2)
        document = await service.get(f"/v1/plans/{ended['plan_id']}")
        plan: Any = read_plan(ended["plan_id"], document)
        assert [name for stage in document["partition"] for name in stage] == NAMES
        assert document["partition"][0][:2] == ["embedding", "block.0"], "what is not to be cut apart"
        assert True in document["recompute"], "else it would not fit"
        assert max(plan.metrics.peak_memory) <= 24 * (1 + 1e-9)

        # The bound of the search holds for every cut, the bound of the plan for its own cut.
        assert ended["lower_bound"] == plan.cut.lower_bound <= plan.metrics.lower_bound
        assert ended["gap"] == pytest.approx(gap_of(plan.objective, plan.cut.lower_bound))
        events = await service.events_of_search(ended["id"])
        bounds = {each["lower_bound"] for each in events if each["event"] == "improvement"}
        assert bounds <= {ended["lower_bound"]}

        for rank in range(2):
            part = read_rank(await service.get(f"/v1/plans/{ended['plan_id']}/ranks/{rank}"))
            assert part.partition == tuple(map(tuple, document["partition"])), "of all stages, on every rank"
            assert part.recompute == tuple(document["recompute"])

        again = {**RECOMPUTED, "memory": {"limit": [24, 24], "static": 0}, "objective": "span"}
        same = await service.submit(again, effort="quick")
        assert (same.status_code, same.json()["id"]) == (200, ended["id"]), "the same, said otherwise"

        # The problem of a plan has a fixed cut, so this searches the order only.
        fixed = await service.done(document["problem"], effort="quick")
        assert fixed["problem_summary"]["layers"] == 8
        of_fixed = await service.get(f"/v1/plans/{fixed['plan_id']}")
        assert of_fixed["partition"] == document["partition"]
        compared = await post(service, "compare", document["problem"])
        assert compared["best"]["plan_id"] == ended["plan_id"]


async def test_a_limit_that_no_cut_fits_is_infeasible_and_names_the_smallest_one(serving: Serving) -> None:
    tight = {**RECOMPUTED, "memory": {"limit": 16}}
    async with serving("solver") as service:
        ended = await service.done(tight)
        assert ended["state"] == "infeasible"
        assert ended["error"]["smallest_limit"] == pytest.approx([19.4, 17.4])
        assert ended["error"]["errors"][0]["pointer"] == "/problem/memory/limit"
        form = await service.page(f"/new?from={ended['id']}&limit=smallest")
        assert '"limit":[19.4' in form.replace(" ", "")
        assert (await post(service, "estimate", tight))["type"] == "/errors/infeasible-memory"


async def test_an_estimate_of_layers_has_a_plan_unless_that_takes_long(honest: Service) -> None:
    least = (await post(honest, "check", RECOMPUTED))["layers"]["least_busy"]
    promised = await post(honest, "estimate", RECOMPUTED)
    assert promised["plan"]["status"] == "feasible"
    assert promised["lower_bound"] == 620 > least == 496, "where every rank has to fit, it has more"
    # Comparing the layers of a thousand ranks would take minutes, so this uses a bound.
    large = {**LAYERED, "pp_degree": 1024, "placement": "auto", "cut": {"allow_empty": True}}
    # Some rank has the head, 66 per microbatch; with two ranks, one has two more blocks.
    for problem, bound in ((large, 4 * 66), ({**LAYERED, "microbatches": 5000}, 5000 * 124)):
        promised = await post(honest, "estimate", problem)
        assert (promised["plan"], promised["lower_bound"]) == (None, bound)
    promised = await post(honest, "estimate", LAYERED)
    plan, bound = promised["plan"], promised["lower_bound"]
    assert plan["gap"] == pytest.approx(plan["span"] / bound - 1)
    assert plan["gap"] >= 0
    assert plan["status"] == ("optimal" if plan["gap"] == 0 else "feasible")
    assert {"even-cut", "histogram-cut"} <= {row["name"] for row in promised["baselines"]}


async def test_many_wrong_layers_are_named_and_nothing_is_stored(service: Service) -> None:
    embedding = LAYERED["layers"][0]
    many = {**LAYERED, "layers": [{**embedding, "name": f"l{at}", "forward": "a lot"} for at in range(300)]}
    answer = await service.submit(many)
    pointers = [error["pointer"] for error in answer.json()["errors"]]
    assert pointers == [f"/problem/layers/{place}/forward" for place in range(100)]
    assert answer.json()["detail"].endswith(" And 200 more.")
    assert len((await post(service, "check", many))["issues"]) == 100
    assert (await service.submit({**LAYERED, "microbatches": 4000})).status_code == 202
    assert (await post(service, "compare", LAYERED))["errors"][0]["pointer"] == "/problem/partition"
    assert len(await service.listed("searches")) == 1


async def test_a_check_summarises_layers_before_they_are_cut(service: Service) -> None:
    found = await post(service, "check", {**LAYERED, "placement": "auto"})
    assert (found["is_valid"], found["facts"]) == (True, None)
    layers = found["layers"]
    assert (layers["layers"], layers["parts"]) == (8, 7)
    assert [each["stages"] for each in layers["placements"]] == [4, 4, 6, 2]
    assert layers["work"] == 1 + 1 + 6 * 29 + 66
    # The mean rank has 121 per microbatch; the closest set of whole layers is the head and two blocks.
    assert layers["least_busy"] == 4 * 124
    assert (layers["static"], layers["held"]) == (30, 14)
    refused = await post(service, "check", LAYERED, limit_fraction=0.5)
    assert [issue["pointer"] for issue in refused["issues"]] == ["/limit_fraction"]
