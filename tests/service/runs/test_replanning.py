"""Replanning: measured costs that drift are searched once, and a better plan is offered or adopted."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from support.fake_searches import orders_of
from support.rank_traces import trace_documents
from support.serving import PROBLEM, Service, Serving
from support.two_ranks import TwoRanks
from zbv_service.runs import dispatch
from zbv_service.runs.replanner import _is_enough, _patience, evaluate, measure
from zbv_solver.measure.rank_trace import parse_rank_trace
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.assemble import make_plan

PLANNED = {**PROBLEM, "units": {"time": "us"}}


def costing(forward: float) -> dict[str, Any]:
    """The problem with another cost of forwards."""
    return {**PLANNED, "costs": {"forward": forward, "backward_input": 1, "backward_weight": 1}}


SLOW = costing(3)
"""The real costs of the ranks. The fake search claims 8 for any plan; the running one then takes 40."""


@pytest.fixture(autouse=True)
def only_explicit_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service looks once when it starts; afterwards only :meth:`Replanned.look` does."""
    monkeypatch.setattr(dispatch, "POLL_SECONDS", 3600.0)


class Replanned(TwoRanks):
    """A run whose measured costs the service looks at."""

    @classmethod
    async def running(cls, service: Service, **options: Any) -> Replanned:
        run = await cls.begin(service, PLANNED, **options)
        for agent in run.agents:
            await service.beat(agent, run.id, 0)
        return run

    async def document(self) -> Any:
        return await self.service.run(self.id)

    async def seen(self, document: dict[str, Any], **how: Any) -> tuple[Any, int]:
        """Send traces, and have the service look; its memory, and the number of searches."""
        await self.measured(document, **how)
        await self.look()
        return await self.memory(), len(await self.service.listed("searches"))

    async def look(self) -> None:
        """Have the service look, as it usually does every second."""
        await self.service.app.state.application.dispatcher.replanner.step()

    async def judge(self) -> Any:
        """Wait for the search of the measured costs, and have the service judge its plan."""
        await self.service.ended((await self.memory())["search_id"])
        await self.look()
        return await self.memory()

    async def memory(self) -> Any:
        """The stored state of replanning."""
        return (await self.service.app.state.application.runs.get(self.id)).replanning

    async def change(self, plan_id: str) -> httpx.Response:
        return await self.service.http.post(f"/v1/runs/{self.id}/plan", json={"plan_id": plan_id})

    async def told(self, agent: int) -> Any:
        """The plan to which a heartbeat tells an agent to switch."""
        return (await self.service.beat(self.agents[agent], self.id))["plan_id"]


async def test_auto_searches_and_changes_the_plan(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "POLL_SECONDS", 0.05)  # in this test the service looks by itself
    async with serving("immediate") as service:
        run = await Replanned.running(service, replan="auto")
        before = run.plan_id
        await run.measured(SLOW, steps=3)
        found = await service.until_run(run.id, lambda seen: seen["target_plan_id"])
        target = found["target_plan_id"]
        assert found["plan_id"] == before != target
        assert (found["offer"]["plan_id"], found["offer"]["objective_then"]) == (target, 8.0)
        assert found["offer"]["objective_now"] == pytest.approx(evaluate(*under(SLOW)))
        assert await run.told(0) == target
        await run.measured(SLOW, steps=1, first_step=5, plan_id=target)
        found = await run.document()
        assert (found["plan_id"], found["target_plan_id"], found["offer"]) == (target, None, None)
        assert await run.told(1) is None
        kinds = [event["kind"] for event in await service.events_of_run(run.id)]
        assert kinds == ["waiting", "starting", "running", "replan", "offer", "swapped"]


def under(document: dict[str, Any]) -> tuple[Problem, Any]:
    problem = parse_problem(PLANNED)
    return parse_problem(document), make_plan(problem, orders_of(problem), method="test")


async def test_ask_waits_for_a_decision(service: Service) -> None:
    run = await Replanned.running(service, replan="ask")
    await run.seen(SLOW, steps=3)
    await run.judge()
    offer = (await run.document())["offer"]["plan_id"]
    assert await run.told(0) is None
    answer = await run.change(offer)
    assert (answer.status_code, answer.json()["target_plan_id"]) == (202, offer)
    assert await run.told(0) == offer


async def test_off_too_few_steps_and_planned_costs_start_no_search(service: Service) -> None:
    run = await Replanned.running(service, replan="off")
    assert await run.seen(SLOW, steps=3) == (None, 0)
    for agent in run.agents:
        await service.end_node(agent, run.id, "succeeded")
    run = await Replanned.running(service, replan="auto")
    assert await run.seen(SLOW, steps=2) == (None, 0)
    for document, first_step, last in ((PLANNED, 2, 4), (costing(1.04), 5, 7)):
        memory, searches = await run.seen(document, steps=3, first_step=first_step)
        assert (memory["step"], searches) == (last, 0)


async def test_costs_without_a_better_plan_are_not_searched_again(honest: Service) -> None:
    """A plan that is no better is not offered. The next look comes later, and needs other costs."""
    run = await Replanned.running(honest, replan="auto")
    assert (await run.seen(SLOW, steps=3))[0]["is_open"]
    known = await run.judge()
    assert (known["is_open"], known["step"], known["searches"]) == (False, 2, 1)
    for document, steps, first_step, last, count in (
        (SLOW, 3, 5, 2, 1),
        (SLOW, 3, 6, 8, 1),
        (costing(4), 15, 9, 23, 2),
    ):
        memory, searches = await run.seen(document, steps=steps, first_step=first_step)
        assert (memory["step"], searches) == (last, count)
    assert (await run.document())["offer"] is None


async def test_a_run_has_at_most_one_open_search(held: Service) -> None:
    run = await Replanned.running(held, replan="auto")
    for step in (0, 3, 6):
        assert (await run.seen(costing(3 + step), steps=3, first_step=step))[1] == 1


async def test_after_a_change_of_plan_only_its_traces_count(service: Service) -> None:
    run = await Replanned.running(service, replan="auto")
    before = run.plan_id
    await run.seen(SLOW, steps=3)
    await run.judge()
    target = (await run.document())["target_plan_id"]
    await run.measured(SLOW, steps=1, first_step=3, plan_id=target)
    assert (await run.seen(costing(9), steps=3, first_step=4, plan_id=before))[1] == 1
    known, searches = await run.seen(costing(9), steps=3, first_step=7, plan_id=target)
    assert (known["plan_id"], known["step"], known["searches"], searches) == (target, 9, 2, 2)


async def test_a_new_generation_starts_with_the_target_plan(service: Service) -> None:
    run = await Replanned.running(service, retries=1)
    target = await service.import_plan(SLOW)
    assert (await run.change(target)).json()["target_plan_id"] == target
    await run.restart()
    assert (await service.work(run.agents[0]))["plan_id"] == target
    assert (await run.document())["target_plan_id"] is None
    swapped = next(event for event in await service.events_of_run(run.id) if event["kind"] == "swapped")
    assert swapped["detail"].endswith("from the start of generation 1")


async def test_a_run_changes_only_to_plans_of_the_same_shape_and_back(service: Service) -> None:
    run = await Replanned.running(service)
    loop = await service.import_plan({**PLANNED, "placement": "loop"})
    longer = await service.import_plan({**PLANNED, "microbatches": 5})
    for plan_id in ("0" * 64, loop, longer):
        answer = await run.change(plan_id)
        assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, "/plan_id")
    assert (await Replanned(service, loop, "e" * 32).change(loop)).status_code == 404
    plan_id, target = (await run.document())["plan_id"], await service.import_plan(SLOW)
    for wanted in (target, plan_id):
        await run.change(wanted)
        assert await run.told(0) == wanted
    await run.measured(PLANNED, plan_id=plan_id)
    assert await run.told(0) is None
    for agent in run.agents:
        await service.end_node(agent, run.id, "succeeded")
    assert (await run.change(target)).status_code == 409


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
