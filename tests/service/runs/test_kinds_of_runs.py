"""Runs of problems are planned first, runs of layers keep their cut, runs of scripts their plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.fake_searches import orders_of
from support.layered import LAYERED
from support.rank_traces import trace_documents
from support.serving import PROBLEM, Service, Serving
from zbv_service.documents.problems import new_search
from zbv_service.runs.replanner import measure
from zbv_service.settings import Settings
from zbv_solver.measure.rank_trace import parse_rank_trace
from zbv_solver.measure.refit import with_stage_costs
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_problem
from zbv_solver.problem.stages import Costs
from zbv_solver.problem.writing import problem_json
from zbv_solver.search.assemble import make_plan

OF_PROBLEM: dict[str, Any] = {"plan_id": None, "problem": PROBLEM}


async def test_a_run_waits_for_its_plan_and_then_for_its_agents(held: Service, directory: Path) -> None:
    answer = await held.submit_run(**OF_PROBLEM, search_options={"effort": "quick", "seed": 7})
    run = answer.json()
    assert (answer.status_code, run["state"], run["plan_id"]) == (202, "planning", None)
    assert (run["nodes"], run["ranks_per_node"]) == (2, 1)
    change = {"plan_id": await held.import_plan()}
    early = await held.http.post(f"/v1/runs/{run['id']}/plan", json=change)
    assert (early.status_code, early.json()["type"]) == (409, "/errors/conflict")
    search = await held.search(run["search_id"])
    assert (search["options"]["effort"], search["options"]["seed"]) == ("quick", 7)
    (directory / "release").touch()
    found = await held.until_run(run["id"], lambda seen: seen["state"] == "waiting")
    assert found["plan_id"] == (await held.search(run["search_id"]))["plan_id"]
    agents = [await held.register(digit) for digit in "ab"]
    assert {(await held.work(agent))["plan_id"] for agent in agents} == {found["plan_id"]}
    kinds = [event["kind"] for event in await held.events_of_run(run["id"])]
    assert kinds == ["planning", "planned", "waiting", "starting"]


async def test_planning_continues_after_a_restart_and_a_finished_search_is_reused(
    serving: Serving, directory: Path
) -> None:
    async with serving("held", shutdown_seconds=0.5) as service:
        run = (await service.submit_run(**OF_PROBLEM, name="nightly")).json()
        assert (await service.search(run["search_id"]))["name"] == "nightly"
    (directory / "release").touch()
    async with serving("held") as service:
        for again in (run, (await service.submit_run(**OF_PROBLEM)).json()):
            found = await service.until_run(again["id"], lambda seen: seen["state"] == "waiting")
            assert again["search_id"] == run["search_id"]
            assert found["plan_id"] == (await service.search(run["search_id"]))["plan_id"]


async def test_a_failed_search_fails_the_run_with_its_error(serving: Serving) -> None:
    async with serving("broken") as service:
        run = (await service.submit_run(**OF_PROBLEM)).json()
        found = await service.until_run(run["id"], lambda seen: seen["state"] == "failed")
        assert found["error"]["detail"] == (await service.search(run["search_id"]))["error"]["detail"]


async def test_a_search_cancelled_without_a_plan_fails_the_run(serving: Serving) -> None:
    async with serving("held", searches=1) as service:
        await service.begun({**PROBLEM, "microbatches": 3})
        run = (await service.submit_run(**OF_PROBLEM)).json()  # queued behind the first
        await service.cancel(run["search_id"])
        found = await service.until_run(run["id"], lambda seen: seen["state"] == "failed")
        assert "was cancelled before it found one" in found["error"]["detail"]


async def test_cancelling_a_run_cancels_its_search_unless_others_use_it(held: Service) -> None:
    other = {**PROBLEM, "microbatches": 3}
    await held.submit(other)
    for problem, is_cancelled in ((PROBLEM, True), (other, False)):
        run = (await held.submit_run(plan_id=None, problem=problem)).json()
        answer = await held.http.post(f"/v1/runs/{run['id']}/cancel")
        assert (answer.status_code, answer.json()["state"]) == (200, "cancelled")
        assert (await held.search(run["search_id"]))["cancel_requested"] == is_cancelled


EARLY = [["embedding", "block.0"], ["block.1"], ["block.2", "block.3"], ["block.4", "block.5", "head"]]
LATE = [["embedding", "block.0", "block.1"], ["block.2"], ["block.3", "block.4", "block.5"], ["head"]]


def cut(partition: list[list[str]]) -> dict[str, Any]:
    return {**LAYERED, "partition": partition}


async def test_a_run_changes_only_to_plans_with_the_same_partition(service: Service) -> None:
    ours, theirs = [await service.import_plan(cut(partition)) for partition in (EARLY, LATE)]
    run = (await service.submit_run(plan_id=ours)).json()
    refused = await service.http.post(f"/v1/runs/{run['id']}/plan", json={"plan_id": theirs})
    assert refused.status_code == 422
    assert "partitions the model differently" in refused.json()["errors"][0]["detail"]
    slower = {**cut(EARLY), "costs": {"p2p": 3}}
    change = {"plan_id": await service.import_plan(slower)}
    taken = await service.http.post(f"/v1/runs/{run['id']}/plan", json=change)
    assert taken.status_code == 202, taken.text


async def test_a_run_can_be_submitted_by_layers(service: Service) -> None:
    answer = await service.submit_run(plan_id=None, problem=LAYERED)
    assert (answer.status_code, answer.json()["ranks_per_node"]) == (202, 1)
    ended = await service.ended(answer.json()["search_id"])
    assert (await service.run(answer.json()["id"]))["search_id"] == ended["id"]
    refused = await service.submit_run(plan_id=None, problem={**LAYERED, "placement": "w"})
    assert refused.json()["errors"][0]["pointer"] == "/problem/placement"


def test_the_measured_problem_keeps_the_partition() -> None:
    problem = parse_problem(cut(EARLY))
    plan = make_plan(problem, orders_of(problem), method="test")
    costs = Costs((20.0, 15.0, 25.0, 60.0), (21.0, 16.0, 26.0, 61.0), (9.0, 8.0, 7.0, 60.0), (2.0,) * 3)
    really = with_stage_costs(problem, costs)
    traces = [parse_rank_trace(document) for document in trace_documents(really, plan.orders)]
    found: Any = measure(plan, plan.problem, tuple(traces))
    assert found.change > 0.1
    assert [list(names) for names in found.problem.model.partition] == EARLY
    # The replanner submits this document; one with contradicting layers and stages would be refused.
    asked = new_search(Settings(), {"problem": problem_json(found.problem)})
    assert asked.summary["layers"] == 8
    assert isinstance(parse_problem(problem_json(found.problem)), Problem)


SCRIPT = {"path": "/shared/train.py", "arguments": ["--lr", "0.1"]}


async def submit_script(service: Service, **more: Any) -> Any:
    body = {"plan_id": await service.import_plan(), "script": SCRIPT, "nodes": 2, "options": {"retries": 0}}
    return await service.http.post("/v1/runs", json={**body, **more})


async def test_a_script_runs_on_agents_that_allow_it_and_reports_its_end(service: Service) -> None:
    answer = await submit_script(service)
    assert answer.status_code == 202, answer.text
    run_id = answer.json()["id"]
    for digit, scripts in (("a", ["/other/*"]), ("b", ["/shared/*"])):
        await service.register(digit, allows={"models": ["*"], "scripts": scripts})
    waiting = await service.until_run(run_id, lambda run: "1 of 2 agents" in (run["waits_for"] or ""))
    assert "each that allow script /shared/train.py" in waiting["waits_for"]
    assert "1 not allowing the script" in waiting["waits_for"]
    await service.register("c", allows={"models": [], "scripts": ["/shared/train.py"]})
    found = await service.work("b" * 32)
    assert (found["script"], found["model"], found["steps"]) == (SCRIPT, None, None)
    for agent in ("b" * 32, "c" * 32):
        assert (await service.run(run_id))["state"] == "starting"
        begun = {"run_id": run_id, "ranks": [{"rank": 0}]}
        await service.http.post(f"/v1/agents/{agent}/heartbeat", json=begun)
    run = await service.run(run_id)
    assert (run["state"], run["script"], run["model"], run["steps"]) == ("running", SCRIPT, None, None)
    assert (await service.events_of_run(run_id))[-1]["detail"] == "every node has begun its script"
    for agent in ("b" * 32, "c" * 32):
        await service.end_node(agent, run_id, "succeeded")
    for page in (f"/runs/{run_id}", "/runs?q=shared", "/agents"):
        assert "/shared/train.py" in await service.words(page)


async def test_a_script_keeps_its_plan(service: Service) -> None:
    run = (await submit_script(service)).json()
    answer = await service.http.post(f"/v1/runs/{run['id']}/plan", json={"plan_id": run["plan_id"]})
    assert answer.status_code == 409
    assert "runs a script, which keeps its plan" in answer.json()["detail"]
