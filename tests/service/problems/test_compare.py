"""Comparisons of classical schedules, without a search."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from support.serving import PROBLEM, Service, Serving
from zbv_solver.documents.files import plain
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.assemble import compare


async def compared(service: Service, problem: Any = PROBLEM) -> httpx.Response:
    return await service.http.post("/v1/problems/compare", json={"problem": problem})


async def test_a_comparison_has_all_baselines_and_the_best_stored_plan(honest: Service) -> None:
    before = (await compared(honest)).json()
    assert before["baselines"] == [plain(found) for found in compare(parse_problem(PROBLEM))]
    assert before["problem_summary"]["pp_degree"] == 2
    assert 0 < before["lower_bound"] <= min(row["span"] for row in before["baselines"])
    assert before["best"] is None
    assert await honest.listed("searches") == []
    assert await honest.listed("plans") == []

    ended = await honest.done()
    after = (await compared(honest, {**PROBLEM, "placement": "v", "objective": "span"})).json()
    assert (after["best"]["plan_id"], after["best"]["value"]) == (ended["plan_id"], ended["objective"])
    assert after["baselines"] == before["baselines"]
    assert after["lower_bound"] >= before["lower_bound"]
    other = (await compared(honest, {**PROBLEM, "microbatches": 5})).json()
    assert other["best"] is None

    # A limit that nothing fits is not an error here: `fits` is false for every baseline.
    tight = {**PROBLEM, "memory": {**PROBLEM["memory"], "limit": 1}}
    assert {row["fits"] for row in (await compared(honest, tight)).json()["baselines"]} == {False}
    single = {**PROBLEM, "placement": "single"}
    merged = {row["name"] for row in (await compared(honest, single)).json()["baselines"]}
    assert {row["name"] for row in before["baselines"]} - merged == {"zb-v", "v-half", "v-min", "dualpipe-v"}


async def test_a_wrong_problem_is_refused(honest: Service) -> None:
    for problem, pointer in (
        ({**PROBLEM, "pp_degree": "two"}, "/problem/pp_degree"),
        ({**PROBLEM, "costs": {**PROBLEM["costs"], "forward": -1}}, "/problem/costs/forward"),
        ({**PROBLEM, "microbatches": 10_000}, "/problem/microbatches"),  # more than the honest accepts
    ):
        answer = await compared(honest, problem)
        assert answer.status_code == 422
        assert answer.json()["errors"][0]["pointer"] == pointer
    unknown = await honest.http.post("/v1/problems/compare", json={"problem": PROBLEM, "options": {}})
    assert unknown.json()["errors"][0]["pointer"] == "/options"


async def test_too_many_comparisons_at_once_are_refused_with_retry_after(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zbv_service.compute.computations.WAITING", 0)
    monkeypatch.setattr("zbv_service.compute.computations.AT_A_TIME_EACH", 0)
    async with serving("honest") as service:
        answer = await compared(service)
        assert (answer.status_code, answer.json()["type"]) == (503, "/errors/not-ready")
        assert int(answer.headers["retry-after"]) > 0
