"""Replanning: measured costs that drift are searched once, and a better plan is offered or adopted."""

from __future__ import annotations

from typing import Any

import pytest
from support.fake_searches import orders_of
from support.rank_traces import trace_documents
from support.serving import PROBLEM, Service, Serving
from zbv_service.runs import dispatch
from zbv_service.runs.replanner import _is_enough, _patience, evaluate, measure
from zbv_solver.measure.rank_trace import parse_rank_trace
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.assemble import make_plan

PLANNED = {**PROBLEM, "units": {"time": "us"}}
SLOW = {**PLANNED, "costs": {"forward": 3, "backward_input": 1, "backward_weight": 1}}
"""The real costs of the ranks. The fake search claims 8 for any plan; the running one then takes 40."""


@pytest.fixture(autouse=True)
def only_explicit_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service looks once when it starts; afterwards only :func:`looked` does."""
    monkeypatch.setattr(dispatch, "POLL_SECONDS", 3600.0)


async def running(service: Service, **options: Any) -> tuple[str, str, str]:
    plan_id = await service.import_plan(PLANNED)
    run_id, first, second = await service.started_run(plan_id=plan_id, **options)
    for agent in (first, second):
        await service.beat(agent, run_id, 0)
    return run_id, first, second


async def measured(
    service: Service, run: tuple[str, str, str], document: dict[str, Any], generation: int = 0, **how: Any
) -> str:
    """Send traces of the ranks with the costs of a document, by default for the plan of the run."""
    run_id, *agents = run
    problem = parse_problem(document)
    plan_id = str(how.pop("plan_id", None) or (await service.run(run_id))["plan_id"])
    for rank, trace in enumerate(trace_documents(problem, orders_of(problem), plan_id=plan_id, **how)):
        address = f"/v1/agents/{agents[rank]}/runs/{run_id}/generations/{generation}/ranks/{rank}/trace"
        answer = await service.http.put(address, json=trace)
        assert answer.status_code == 204, answer.text
    return plan_id


async def looked(service: Service) -> None:
    """Have the service look, as it usually does every second."""
    await service.app.state.application.dispatcher.replanner.step()


async def replanned(service: Service, run_id: str) -> None:
    """Look, wait for the search of the measured costs, and judge its plan."""
    await looked(service)
    await service.ended((await memory(service, run_id))["search_id"])
    await looked(service)


async def searches(service: Service) -> int:
    return len(await service.listed("searches"))


async def test_auto_searches_offers_and_changes_the_plan(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "POLL_SECONDS", 0.05)  # in this test the service looks by itself
    async with serving("immediate") as service:
        run = run_id, first, second = await running(service, replan="auto")
        before = await measured(service, run, SLOW, steps=3)
        target = (await service.until_run(run_id, lambda seen: seen["target_plan_id"]))["target_plan_id"]
        found = await service.run(run_id)
        assert found["plan_id"] == before != target
        assert (found["offer"]["plan_id"], found["offer"]["objective_then"]) == (target, 8.0)
        assert found["offer"]["objective_now"] == pytest.approx(evaluate(*under(SLOW)))
        assert (await service.beat(first, run_id))["plan_id"] == target
        await measured(service, run, SLOW, steps=1, first_step=5, plan_id=target)
        found = await service.run(run_id)
        assert (found["plan_id"], found["target_plan_id"], found["offer"]) == (target, None, None)
        assert (await service.beat(second, run_id))["plan_id"] is None
        kinds = [event["kind"] for event in await service.events_of_run(run_id)]
        assert kinds == ["waiting", "starting", "running", "replan", "offer", "swapped"]


def under(document: dict[str, Any]) -> tuple[Problem, Any]:
    problem = parse_problem(PLANNED)
    return parse_problem(document), make_plan(problem, orders_of(problem), method="test")


async def test_ask_waits_for_a_decision_and_off_does_nothing(serving: Serving) -> None:
    async with serving("immediate") as service:
        run = run_id, first, _ = await running(service, replan="ask")
        await measured(service, run, SLOW, steps=3)
        await replanned(service, run_id)
        offer = (await service.run(run_id))["offer"]
        assert (await service.beat(first, run_id))["plan_id"] is None
        answer = await service.http.post(f"/v1/runs/{run_id}/plan", json={"plan_id": offer["plan_id"]})
        assert (answer.status_code, answer.json()["target_plan_id"]) == (202, offer["plan_id"])
        assert (await service.beat(first, run_id))["plan_id"] == offer["plan_id"]
        await service.http.post(f"/v1/runs/{run_id}/cancel")
    async with serving("immediate") as service:
        for agent in run[1:]:
            await service.end_node(agent, run_id, "stopped")
        plan_id = (await service.run(run_id))["plan_id"]
        answer = await service.submit_run(plan_id=plan_id, options={"replan": "off"})
        other = answer.json()["id"], *run[1:]
        for agent in other[1:]:
            await service.work(agent)
            await service.beat(agent, other[0], 0)
        count = await searches(service)
        await measured(service, other, SLOW, steps=3)
        await looked(service)
        assert await searches(service) == count


async def test_too_few_steps_or_planned_costs_start_no_search(service: Service) -> None:
    run = run_id, *_ = await running(service, replan="auto")
    await measured(service, run, SLOW, steps=2)
    await looked(service)
    assert (await searches(service), await memory(service, run_id)) == (0, None)
    await measured(service, run, PLANNED, steps=3, first_step=2)
    await looked(service)
    assert (await memory(service, run_id))["step"] == 4
    nearly = {**PLANNED, "costs": {"forward": 1.04, "backward_input": 1, "backward_weight": 1}}
    await measured(service, run, nearly, steps=3, first_step=5)
    await looked(service)
    assert (await searches(service), (await memory(service, run_id))["step"]) == (0, 7)


async def memory(service: Service, run_id: str) -> Any:
    """The stored state of replanning."""
    record = await service.app.state.application.runs.get(run_id)
    return record.replanning


async def test_costs_without_a_better_plan_are_not_searched_again(honest: Service) -> None:
    """A plan that is no better is not offered. The next look comes later, and needs other costs."""
    run = run_id, *_ = await running(honest, replan="auto")
    await measured(honest, run, SLOW, steps=3)
    await looked(honest)
    assert (await memory(honest, run_id))["is_open"]
    await honest.ended((await memory(honest, run_id))["search_id"])
    await looked(honest)
    known = await memory(honest, run_id)
    assert (known["is_open"], known["step"], known["searches"]) == (False, 2, 1)
    await measured(honest, run, SLOW, steps=3, first_step=5)
    await looked(honest)
    assert (await memory(honest, run_id))["step"] == 2
    await measured(honest, run, SLOW, steps=3, first_step=6)
    await looked(honest)
    assert ((await memory(honest, run_id))["step"], await searches(honest)) == (8, 1)
    slower = {**PLANNED, "costs": {"forward": 4, "backward_input": 1, "backward_weight": 1}}
    await measured(honest, run, slower, steps=15, first_step=9)
    await looked(honest)
    assert await searches(honest) == 2
    assert (await honest.run(run_id))["offer"] is None


async def test_a_run_has_at_most_one_open_search(held: Service) -> None:
    run = run_id, *_ = await running(held, replan="auto")
    for step in (0, 3, 6):
        costs = {"forward": 3 + step, "backward_input": 1, "backward_weight": 1}
        await measured(held, run, {**PLANNED, "costs": costs}, steps=3, first_step=step)
        await looked(held)
    assert await searches(held) == 1
    await held.http.post(f"/v1/searches/{(await memory(held, run_id))['search_id']}/cancel")


async def test_after_a_change_of_plan_only_its_traces_count(service: Service) -> None:
    run = run_id, *_ = await running(service, replan="auto")
    before = await measured(service, run, SLOW, steps=3)
    await replanned(service, run_id)
    target = (await service.run(run_id))["target_plan_id"]
    await measured(service, run, SLOW, steps=1, first_step=3, plan_id=target)
    slower = {**PLANNED, "costs": {"forward": 9, "backward_input": 1, "backward_weight": 1}}
    await measured(service, run, slower, steps=3, first_step=4, plan_id=before)
    await looked(service)
    assert await searches(service) == 1
    await measured(service, run, slower, steps=3, first_step=7, plan_id=target)
    await looked(service)
    assert await searches(service) == 2
    known = await memory(service, run_id)
    assert (known["plan_id"], known["step"], known["searches"]) == (target, 9, 2)


async def test_a_new_generation_starts_with_the_target_plan(service: Service) -> None:
    run_id, first, second = await running(service, retries=1)
    target = await service.import_plan(SLOW)
    answer = await service.http.post(f"/v1/runs/{run_id}/plan", json={"plan_id": target})
    assert answer.json()["target_plan_id"] == target
    await service.end_node(first, run_id, "failed", {"kind": "error", "rank": 0, "detail": "d"})
    await service.end_node(second, run_id, "stopped")
    assert (await service.work(first))["plan_id"] == target
    assert (await service.run(run_id))["target_plan_id"] is None
    swapped = next(event for event in await service.events_of_run(run_id) if event["kind"] == "swapped")
    assert swapped["detail"].endswith("from the start of generation 1")


async def test_a_run_changes_only_to_plans_of_the_same_shape(service: Service) -> None:
    run_id, first, second = await running(service)
    loop = await service.import_plan({**PLANNED, "placement": "loop"})
    longer = await service.import_plan({**PLANNED, "microbatches": 5})
    for plan_id in ("0" * 64, loop, longer):
        answer = await service.http.post(f"/v1/runs/{run_id}/plan", json={"plan_id": plan_id})
        assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, "/plan_id")
    unknown = await service.http.post(f"/v1/runs/{'e' * 32}/plan", json={"plan_id": loop})
    assert unknown.status_code == 404
    target = await service.import_plan(SLOW)
    for agent in (first, second):
        await service.end_node(agent, run_id, "succeeded")
    answer = await service.http.post(f"/v1/runs/{run_id}/plan", json={"plan_id": target})
    assert answer.status_code == 409


async def test_a_change_of_plan_can_be_reverted(service: Service) -> None:
    run = run_id, first, _ = await running(service)
    plan_id = (await service.run(run_id))["plan_id"]
    target = await service.import_plan(SLOW)
    for wanted in (target, plan_id):
        await service.http.post(f"/v1/runs/{run_id}/plan", json={"plan_id": wanted})
        assert (await service.beat(first, run_id))["plan_id"] == wanted
    await measured(service, run, PLANNED, plan_id=plan_id)
    assert (await service.beat(first, run_id))["plan_id"] is None


def test_three_steps_or_one_with_many_microbatches_are_enough_and_every_search_doubles_the_patience() -> None:
    assert [_is_enough(steps, 4) for steps in range(5)] == [False, False, False, True, True]
    assert (_is_enough(1, 1000), _is_enough(0, 10**6)) == (True, False)
    assert [_patience(searches) for searches in (0, 1, 2, 3, 10, 1000)] == [3, 6, 12, 24, 3072, 3072]


def test_a_change_of_the_objective_counts_like_a_change_of_a_stage() -> None:
    problem, plan = under(PLANNED)
    slow = parse_problem({**PLANNED, "costs": {**PLANNED["costs"], "p2p": 5}})
    traces = tuple(map(parse_rank_trace, trace_documents(slow, plan.orders, steps=3)))
    found = measure(plan, problem, traces)
    assert found.problem.costs.forward == problem.costs.forward
    assert found.change == pytest.approx(found.objective / plan.objective - 1)
    assert found.change > 0.5
