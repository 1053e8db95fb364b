"""Packings of batches. Nothing is stored."""

from __future__ import annotations

from typing import Any

import httpx
from support.serving import PROBLEM, Service

PIPELINE: dict[str, Any] = {
    "pp_degree": 2,
    "costs": {"forward": {"tokens": 1}, "backward_input": {"tokens": 1}, "backward_weight": {"tokens": 1}},
    "memory": {"forward": {"tokens": 1}, "backward_input": 0, "backward_weight": {"tokens": -1}, "limit": 40},
}
BATCH: dict[str, Any] = {"sequences": [5, 9, 2, 7, 1], "max_tokens": 10, "replicas": 2, "problem": PIPELINE}


async def packed(service: Service, batch: Any) -> httpx.Response:
    return await service.http.post("/v1/problems/pack", json={"batch": batch})


async def test_a_packing_has_the_problem_of_every_replica(honest: Service) -> None:
    answer = await packed(honest, BATCH)
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
    for collection in ("searches", "plans"):
        assert (await honest.get(f"/v1/{collection}"))[collection] == []


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
        answer = await packed(honest, {**BATCH, **change})
        assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, pointer), change
    tight = {**PIPELINE, "memory": {**PIPELINE["memory"], "limit": 9}}
    answer = await packed(honest, {**BATCH, "problem": tight})
    assert (answer.status_code, answer.json()["type"]) == (422, "/errors/infeasible-memory")
    assert answer.json()["errors"][0]["pointer"] == "/batch/problem/memory/limit"
    assert (await packed(honest, PROBLEM)).status_code == 422
