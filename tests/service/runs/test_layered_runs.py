"""Runs of plans from layers keep the partition, also when costs are measured and plans offered."""

from __future__ import annotations

from typing import Any

import pytest
from support.fake_searches import orders_of
from support.layered import LAYERED
from support.rank_traces import trace_documents
from support.serving import MODEL, Service
from zbv_service.client.answers import read_rank
from zbv_service.client.errors import InvalidAnswer
from zbv_service.runs.replanner import measure
from zbv_service.searches.searches import new_search
from zbv_service.settings import Settings
from zbv_solver.measure.rank_trace import parse_rank_trace
from zbv_solver.measure.refit import with_stage_costs
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_problem
from zbv_solver.problem.stages import Costs
from zbv_solver.problem.writing import problem_json
from zbv_solver.search.assemble import make_plan

EARLY = [["embedding", "block.0"], ["block.1"], ["block.2", "block.3"], ["block.4", "block.5", "head"]]
LATE = [["embedding", "block.0", "block.1"], ["block.2"], ["block.3", "block.4", "block.5"], ["head"]]


def cut(partition: list[list[str]]) -> dict[str, Any]:
    return {**LAYERED, "partition": partition}


async def test_a_run_changes_only_to_plans_with_the_same_partition(service: Service) -> None:
    ours, theirs = [await service.import_plan(cut(partition)) for partition in (EARLY, LATE)]
    document = await service.get(f"/v1/plans/{ours}")
    assert document["partition"] == EARLY
    run = (await service.submit_run(plan_id=ours)).json()
    refused = await service.http.post(f"/v1/runs/{run['id']}/plan", json={"plan_id": theirs})
    assert refused.status_code == 422
    assert "partitions the model differently" in refused.json()["errors"][0]["detail"]
    slower = {**cut(EARLY), "costs": {"p2p": 3}}
    taken = await service.http.post(
        f"/v1/runs/{run['id']}/plan", json={"plan_id": await service.import_plan(slower)}
    )
    assert taken.status_code == 202, taken.text


async def test_a_run_can_be_submitted_by_layers(service: Service) -> None:
    body = {"problem": LAYERED, "model": MODEL, "nodes": 2, "steps": 5}
    answer = await service.http.post("/v1/runs", json=body)
    assert answer.status_code == 202, answer.text
    assert answer.json()["ranks_per_node"] == 1
    ended = await service.ended(answer.json()["search_id"])
    assert (await service.run(answer.json()["id"]))["search_id"] == ended["id"]
    wrong = {**body, "problem": {**LAYERED, "placement": "w"}}
    refused = await service.http.post("/v1/runs", json=wrong)
    assert refused.json()["errors"][0]["pointer"] == "/problem/placement"


def test_the_measured_problem_keeps_the_partition() -> None:
    problem = parse_problem(cut(EARLY))
    plan = make_plan(problem, orders_of(problem), method="test")
    costs = Costs((20.0, 15.0, 25.0, 60.0), (21.0, 16.0, 26.0, 61.0), (9.0, 8.0, 7.0, 60.0), (2.0,) * 3)
    really = with_stage_costs(problem, costs)
    traces = [parse_rank_trace(document) for document in trace_documents(really, plan.orders)]
    found = measure(plan, plan.problem, tuple(traces))
    assert found.change > 0.1
    assert found.problem.model is not None
    assert [list(names) for names in found.problem.model.partition] == EARLY
    # The replanner submits this document; one with contradicting layers and stages would be refused.
    asked = new_search(Settings(), {"problem": problem_json(found.problem)})
    assert asked.summary["layers"] == 8
    assert isinstance(parse_problem(problem_json(found.problem)), Problem)


def test_a_rank_with_an_invalid_partition_is_refused() -> None:
    rank: dict[str, Any] = {"plan_id": "p", "rank": 0, "pp_degree": 1, "microbatches": 1}
    rank |= {"placement": "single", "chunks": 1, "stages": [0], "actions": [], "peers": [], "channels": []}
    found = read_rank({**rank, "partition": [["a", "b"]], "recompute": [True]})
    assert (found.partition, found.recompute) == ((("a", "b"),), (True,))
    assert (read_rank(rank).partition, read_rank(rank).recompute) == (None, None)
    for wrong in ({"partition": ["a"]}, {"partition": [[1]]}, {"recompute": [1]}, {"recompute": True}):
        with pytest.raises(InvalidAnswer):
            read_rank({**rank, **wrong})
