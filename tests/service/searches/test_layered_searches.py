"""Searches of layers: cut, placed and ordered together; stored and resumed like any other search."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from support.fake_searches import plan_of, stages_of
from support.layered import LAYERED, NAMES, RECOMPUTED
from support.serving import Service, Serving
from zbv_service.client.answers import read_plan, read_rank
from zbv_service.documents.problems import incumbent_of, pack, pack_plan, question_json
from zbv_service.records.searches import Claim, Outcome, Update
from zbv_service.searches.executors.task import search_plan, solver_search
from zbv_solver.plans.plan import Plan, gap_of
from zbv_solver.problem.reading import parse_any_problem


async def plan_of_search(service: Service, found: dict[str, Any]) -> dict[str, Any]:
    answer = await service.http.get(f"/v1/plans/{found['plan_id']}")
    document: dict[str, Any] = answer.json()
    return document


async def test_layers_are_cut_and_the_plan_and_its_ranks_show_the_cut(serving: Serving) -> None:
    async with serving("solver") as service:
        accepted = await service.submit(RECOMPUTED, effort="quick")
        assert accepted.status_code == 202, accepted.text
        summary = accepted.json()["problem_summary"]
        assert (summary["layers"], summary["placement"], summary["pp_degree"]) == (8, "v", 2)
        ended = await service.ended(accepted.json()["id"])
        document = await plan_of_search(service, ended)
        plan = read_plan(ended["plan_id"], document)
        assert [name for stage in document["partition"] for name in stage] == NAMES
        assert document["partition"][0][:2] == ["embedding", "block.0"], "what is not to be cut apart"
        assert True in document["recompute"], "else it would not fit"
        assert max(plan.metrics.peak_memory) <= 24 * (1 + 1e-9)

        # The bound of the search holds for every cut, the bound of the plan for its own cut.
        assert plan.cut is not None
        assert ended["lower_bound"] == plan.cut.lower_bound <= plan.metrics.lower_bound
        assert ended["gap"] == pytest.approx(gap_of(plan.objective, plan.cut.lower_bound))
        listed = await service.http.get(
            f"/v1/searches/{ended['id']}/events", headers={"Accept": "application/json"}
        )
        events = listed.json()["events"]
        assert {each["lower_bound"] for each in events if each["event"] == "improvement"} <= {
            ended["lower_bound"]
        }

        for rank in range(2):
            answer = await service.http.get(f"/v1/plans/{ended['plan_id']}/ranks/{rank}")
            part = read_rank(answer.json())
            assert part.partition == tuple(map(tuple, document["partition"])), "of all stages, on every rank"
            assert part.recompute == tuple(document["recompute"])

        again = {**RECOMPUTED, "memory": {"limit": [24, 24], "static": 0}, "objective": "span"}
        same = await service.submit(again, effort="quick")
        assert (same.status_code, same.json()["id"]) == (200, ended["id"]), "the same, said otherwise"

        # The problem of a plan has a fixed cut, so this searches the order only.
        fixed = await service.done(document["problem"], effort="quick")
        assert fixed["problem_summary"]["layers"] == 8
        assert (await plan_of_search(service, fixed))["partition"] == document["partition"]
        compared = await service.http.post("/v1/problems/compare", json={"problem": document["problem"]})
        assert compared.json()["best"]["plan_id"] == ended["plan_id"]


async def test_a_limit_that_no_cut_fits_is_infeasible_and_names_the_smallest_possible_one(
    serving: Serving,
) -> None:
    tight = {**RECOMPUTED, "memory": {"limit": 16}}
    async with serving("solver") as service:
        ended = await service.done(tight)
        assert ended["state"] == "infeasible"
        assert ended["error"]["smallest_limit"] == pytest.approx([19.4, 17.4])
        assert ended["error"]["errors"][0]["pointer"] == "/problem/memory/limit"
        form = (await service.http.get(f"/new?from={ended['id']}&limit=smallest")).text
        assert "the smallest that some plan fits" in form
        assert '"limit":[19.4' in form.replace(" ", "").replace("19.400000000000002", "19.4")
        estimated = await service.http.post("/v1/problems/estimate", json={"problem": tight})
        assert (estimated.status_code, estimated.json()["type"]) == (422, "/errors/infeasible-memory")

        checked = await service.http.post("/v1/problems/check", json={"problem": RECOMPUTED})
        least = checked.json()["layers"]["least_busy"]
        promised = await service.http.post("/v1/problems/estimate", json={"problem": RECOMPUTED})
        assert promised.json()["plan"]["status"] == "feasible"
        assert promised.json()["lower_bound"] == 620 > least == 496, (
            "where every rank has to fit, it has more"
        )
        # Comparing the layers of a thousand ranks would take minutes, so this uses a bound.
        large = {**LAYERED, "pp_degree": 1024, "placement": "auto", "cut": {"allow_empty": True}}
        # Some rank has the head, 66 per microbatch; with two ranks, one has two more blocks.
        for problem, bound in ((large, 4 * 66), ({**LAYERED, "microbatches": 5000}, 5000 * 124)):
            promised = await service.http.post("/v1/problems/estimate", json={"problem": problem})
            assert (promised.json()["plan"], promised.json()["lower_bound"]) == (None, bound)
        promised = await service.http.post("/v1/problems/estimate", json={"problem": LAYERED})
        found = promised.json()
        assert found["lower_bound"] <= found["plan"]["span"]
        assert found["plan"]["status"] == ("optimal" if found["plan"]["gap"] == 0 else "feasible")
        assert found["plan"]["gap"] == pytest.approx(found["plan"]["span"] / found["lower_bound"] - 1)
        assert {"even-cut", "histogram-cut"} <= {row["name"] for row in found["baselines"]}


async def test_a_wrong_layer_is_named_and_nothing_is_stored(service: Service) -> None:
    embedding, block, head = LAYERED["layers"]
    for changes, pointer in (
        ({"layers": [embedding, {**block, "colour": "red"}, head]}, "/layers/1/colour"),
        ({"layers": [embedding, {**block, "repeat": 10**9}, head]}, "/layers"),
        ({"pp_degree": 4096}, "/pp_degree"),
        ({"cut": {"together": [["head"]] * 600}}, "/cut/together"),
        ({"cut": {"together": [["head"] * 600]}}, "/cut/together/0"),
        ({"partition": [["head"]] * 4, "recompute": [1, 0, 0, 0]}, "/recompute/0"),
        ({"partition": [["head"], [], [], []]}, "/partition/0/0"),
        # One stage may get everything, which exceeds the limit of a stage or of its transfer.
        ({"layers": [embedding, {**block, "forward": 9e14}, head]}, "/layers"),
        ({"costs": {"link": {"bandwidth": 1e-300}}}, "/costs/link"),
        ({"microbatches": 10_000}, "/microbatches"),
        # The finest placement has eight stages: fewer microbatches than the four of V allow.
        ({"placement": "auto", "microbatches": 4000}, "/microbatches"),
    ):
        answer = await service.submit({**LAYERED, **changes})
        assert answer.status_code == 422, changes
        assert answer.json()["errors"][0]["pointer"] == f"/problem{pointer}", changes
    many = {**LAYERED, "layers": [{**embedding, "name": f"l{at}", "forward": "a lot"} for at in range(300)]}
    answer = await service.submit(many)
    pointers = [error["pointer"] for error in answer.json()["errors"]]
    assert pointers == [f"/problem/layers/{place}/forward" for place in range(100)]
    assert answer.json()["detail"].endswith(" And 200 more.")
    checked = await service.http.post("/v1/problems/check", json={"problem": many})
    assert len(checked.json()["issues"]) == 100
    endless = json.dumps({"problem": LAYERED}).replace('"bandwidth": 100', '"bandwidth": 1e999')
    headers = {"Content-Type": "application/json"}
    answer = await service.http.post("/v1/searches", content=endless, headers=headers)
    assert answer.json()["errors"][0]["pointer"] == "/problem/costs/link/bandwidth"
    assert (await service.submit({**LAYERED, "microbatches": 4000})).status_code == 202
    uncut = await service.http.post("/v1/problems/compare", json={"problem": LAYERED})
    assert uncut.json()["errors"][0]["pointer"] == "/problem/partition"
    assert len(await service.listed("searches")) == 1


async def test_a_check_summarises_layers_before_they_are_cut(service: Service) -> None:
    body = {"problem": {**LAYERED, "placement": "auto"}}
    found = (await service.http.post("/v1/problems/check", json=body)).json()
    assert (found["is_valid"], found["facts"]) == (True, None)
    layers = found["layers"]
    assert (layers["layers"], layers["parts"]) == (8, 7)
    assert [each["stages"] for each in layers["placements"]] == [4, 4, 6, 2]
    assert layers["work"] == 1 + 1 + 6 * 29 + 66
    # The mean rank has 121 per microbatch; the closest set of whole layers is the head and two blocks.
    assert layers["least_busy"] == 4 * 124
    assert (layers["static"], layers["held"]) == (30, 14)
    fraction = {"problem": LAYERED, "limit_fraction": 0.5}
    refused = (await service.http.post("/v1/problems/check", json=fraction)).json()
    assert [issue["pointer"] for issue in refused["issues"]] == ["/limit_fraction"]


class Listener:
    """A reporter without a service: keeps the reports, and can stop the search."""

    def __init__(self, *, is_stopped: bool = False):
        self.reports: list[Update] = []
        self._is_stopped = is_stopped

    def report(self, make: Callable[[], Update]) -> None:
        self.reports.append(make())

    def is_stopped(self) -> bool:
        return self._is_stopped


def test_a_stopped_search_stores_a_complete_cut_for_the_next_attempt() -> None:
    known = Outcome.of(pack_plan(plan_of(stages_of(parse_any_problem(LAYERED)))))
    given: list[Any] = []

    def search(problem: Any, options: Any, on_progress: Any, cancelled: Any, incumbent: Any) -> Plan:
        given.append(incumbent)
        return solver_search(problem, options, on_progress, cancelled, incumbent)

    listener = Listener(is_stopped=True)
    problem = pack(question_json(parse_any_problem(LAYERED)))
    task = Claim("s", 1, problem, {"effort": "quick"}, incumbent_of(known).incumbent, 1, False)
    found = search_plan(task, listener, search)
    (incumbent,) = given
    assert isinstance(incumbent, Plan)
    assert incumbent.problem == stages_of(parse_any_problem(LAYERED))
    # It stops immediately, and is still at least as good as its incumbent.
    assert found.plans[0].summary.value <= incumbent.objective
    assert all(report.objective is not None for report in listener.reports)
