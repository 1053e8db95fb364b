"""Frontiers: stored plans are found, missing points are searched once, layers are cut at every limit."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
from support.fake_searches import plan_of
from support.layered import NAMES, RECOMPUTED
from support.serving import PROBLEM, Service, Serving
from zbv_service.documents.problems import asked_of, problem_key
from zbv_service.frontier.problems import CutSummary, Frontier, Point, holds_up_to, problems_of_stages
from zbv_solver.frontiers import memory_fraction
from zbv_solver.frontiers.limits import Known, at_limit
from zbv_solver.plans.plan import Baseline, CutCertificate
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_problem
from zbv_solver.problem.writing import layered_json, problem_json

LEAST = memory_fraction.smallest(parse_problem(PROBLEM))


def at(fraction: float) -> dict[str, Any]:
    return problem_json(memory_fraction.at_fraction(parse_problem(PROBLEM), fraction))


async def planned(service: Service, problem: dict[str, Any], **options: Any) -> str:
    """The id of the plan of a quick search."""
    found = await service.ended((await service.submit(problem, effort="quick", **options)).json()["id"])
    assert found["state"] == "done", found
    return str(found["plan_id"])


async def frontier(service: Service, plan_id: str) -> Frontier:
    """The frontier of a plan, with all bounds."""
    found: Frontier = await service.app.state.application.frontiers.of(plan_id)
    assert all(point.bound is not None for point in found.points)
    return found


async def ask(service: Service, plan_id: str, **form: str) -> Any:
    """Press the button that searches missing points."""
    headers = {"Sec-Fetch-Site": "same-origin"}
    return await service.http.post(f"/plans/{plan_id}/frontier", data=form, headers=headers)


async def test_a_plan_counts_at_every_limit_that_it_fits_and_the_page_links_it(honest: Service) -> None:
    tight, own = await planned(honest, at(LEAST)), await planned(honest, at(1.0))
    found = await frontier(honest, own)
    assert found.points[0].at == LEAST
    assert {plan.name for plan in found.plans} == {tight, own}
    assert found.own.name == own
    for point in found.points:
        fitting = [plan for plan in found.plans if plan.needs <= point.at * (1 + 1e-9)]
        assert point.best is not None
        assert point.best.value == min(plan.value for plan in fitting)
    values = [point.best.value for point in found.points if point.best is not None]
    bounds = [point.bound for point in found.points if point.bound is not None]
    # A bound for little memory does not hold for more memory.
    assert all(bound <= value * (1 + 1e-9) for bound, value in zip(bounds, values, strict=True))
    assert len(bounds) == len(found.points)
    for falling in (values, bounds):
        assert falling == sorted(falling, reverse=True)

    page = await honest.page(f"/plans/{own}/frontier")
    assert page.count('class="asked ') == len(found.points)
    for plan_id in (tight, own):
        assert re.search(rf'<a href="/plans/{plan_id}" aria-label="', page)


async def test_a_frontier_has_the_objective_of_its_plan(honest: Service) -> None:
    for objective in ("span", "makespan"):
        plan_id = await planned(honest, {**at(1.0), "objective": objective})
        assert (await frontier(honest, plan_id)).objective == objective


def test_a_point_is_proved_if_its_plan_reaches_the_bound() -> None:
    point = Point(1.0, 8.0, Known("plan", 1.0, 100.0), 99.5, None, True)
    assert not point.is_proved
    assert replace(point, bound=100.0 * (1 - 1e-12)).is_proved
    assert not replace(point, bound=None).is_proved
    assert not replace(point, best=None).is_proved


def test_the_bound_of_the_plans_own_problem_holds_up_to_its_limit() -> None:
    own, unlimited = at(1.01), {**at(1.01), "memory": {**at(1.01)["memory"], "limit": None}}
    found = problems_of_stages(parse_problem(own), (LEAST, 1.0, 2.0))
    assert found.keys[problem_key(own)] == pytest.approx(1.01)
    assert found.keys[problem_key(unlimited)] == math.inf
    assert [found.keys[point.key] for point in found.points] == [LEAST, 1.0, 2.0]


async def test_plans_of_limits_in_between_and_of_no_limit_are_found(honest: Service) -> None:
    unlimited = {**PROBLEM, "memory": {**PROBLEM["memory"], "limit": None}}
    stored = [await planned(honest, problem) for problem in (at(1.1), unlimited, at(LEAST))]
    assert {plan.name for plan in (await frontier(honest, stored[-1])).plans} >= {*stored}


async def test_missing_points_are_searched_once(honest: Service) -> None:
    plan_id = await planned(honest, at(1.0))
    address, missing = f"/plans/{plan_id}/frontier", len((await frontier(honest, plan_id)).missing)
    assert missing
    for _ in range(2):
        answer = await ask(honest, plan_id, effort="quick")
        assert (answer.status_code, answer.headers["location"]) == (303, address)
        searches = await honest.listed("searches")
        assert len(searches) == 1 + missing
        for search in searches:
            await honest.ended(search["id"])
        found = await frontier(honest, plan_id)
        assert (found.missing, found.open) == ((), ())

    unproved = sum(not point.is_proved for point in found.points)
    answer = await ask(honest, plan_id, effort="quick", again="1")
    assert answer.headers["location"] == f"{address}?known={unproved}"
    assert "already searched with that effort" in await honest.page(answer.headers["location"])
    answer = await ask(honest, plan_id, effort="standard", again="1")
    assert answer.headers["location"] == address
    assert len(await honest.listed("searches")) == 1 + missing + unproved


async def test_a_caller_with_too_many_searches_sees_the_number_of_refused_points(serving: Serving) -> None:
    async with serving("honest") as service:
        plan_id = await planned(service, at(1.0))
    async with serving("held", max_searches_per_token=2) as service:
        missing = len((await frontier(service, plan_id)).missing)
        answer = await ask(service, plan_id, effort="quick")
        refused = missing - 2
        assert answer.headers["location"].endswith(f"?refused={refused}")
        assert f"{refused} point" in await service.page(answer.headers["location"])
        found = await frontier(service, plan_id)
        assert (len(found.open), len(found.missing)) == (2, refused)


async def test_wrong_forms_are_refused_and_a_problem_without_memory_gets_advice(serving: Serving) -> None:
    async with serving("honest", max_effort="quick") as service:
        plan_id = await planned(service, at(1.0))
        for effort in ("standard", "enormous"):
            assert (await ask(service, plan_id, effort=effort)).status_code == 422
        assert (await ask(service, "0" * 64, effort="quick")).status_code == 404
        assert (await service.http.get(f"/plans/{'0' * 64}/frontier")).status_code == 404
        assert (await service.http.get(f"/plans/{plan_id}/frontier?refused=-1")).status_code == 422
        page = await service.page(f"/plans/{plan_id}/frontier")
        assert ("<option selected>quick</option>" in page, "standard</option>" in page) == (True, False)

        plan_id = await planned(service, {**PROBLEM, "memory": None})
        assert "has no memory costs" in await service.page(f"/plans/{plan_id}/frontier")
        assert (await ask(service, plan_id, effort="quick")).status_code == 422


UNLIMITED = {**RECOMPUTED, "memory": {}}
CUT = {**UNLIMITED, "partition": [NAMES[:2], NAMES[2:4], NAMES[4:6], NAMES[6:]]}


async def test_every_limit_is_cut_and_searched_once(serving: Serving) -> None:
    async with serving("first") as service:
        plan_id = await planned(service, UNLIMITED)
        own = await service.app.state.application.plans.plan(plan_id)
        before = await frontier(service, plan_id)
        assert [point.at for point in before.points] == [point.limit for point in before.points]
        fitting = [point for point in before.points if point.limit >= before.own.needs * (1 - 1e-9)]
        assert [point for point in before.points if point.best is not None] == fitting != []
        assert {point.best for point in fitting} == {before.own}
        # A bound without a limit holds at every limit.
        assert own.cut is not None
        assert all((point.bound or 0) >= own.cut.lower_bound for point in before.points)
        assert (before.points[0].bound or 0) > own.cut.lower_bound

        missing = len(before.missing)
        assert missing >= 8
        answer = await ask(service, plan_id, effort="quick")
        assert answer.headers["location"] == f"/plans/{plan_id}/frontier"
        for search in await service.listed("searches"):
            assert (await service.ended(search["id"]))["state"] == "done"
        after = await frontier(service, plan_id)
        assert (len(after.missing), len(after.open)) == (0, 0)
        await ask(service, plan_id, effort="quick")
        assert len(await service.listed("searches")) == 1 + missing

        values = [point.best.value for point in after.points if point.best is not None]
        assert len(values) == len(after.points)
        assert values == sorted(values, reverse=True)
        assert values[0] > values[-1]
        assert after.cuts is not None
        first = after.points[0].best
        assert first is not None
        assert after.cuts[first.name].recomputed > 0
        assert after.cuts[plan_id] == CutSummary("v", 2, 4, 0)

        assert "of 4 stages recomputed" in await service.page(f"/plans/{plan_id}/frontier")
        # The plan of another limit has the same frontier.
        other = await frontier(service, first.name)
        assert [point.at for point in other.points] == [point.at for point in after.points]
        assert {plan.name for plan in other.plans} == {plan.name for plan in after.plans}
        assert len({plan.name for plan in other.plans}) == len(other.plans)
        # Its own bound, which was proved for little memory, does not hold for more.
        assert [point.bound for point in other.points] == [point.bound for point in after.points]
        assert all((point.bound or 0) <= value for point, value in zip(other.points, values, strict=True))


async def test_a_given_cut_is_kept_and_layers_without_memory_have_no_frontier(honest: Service) -> None:
    plan_id = await planned(honest, CUT)
    found = await frontier(honest, plan_id)
    assert found.cuts is None
    assert "The division into stages is fixed" in await honest.page(f"/plans/{plan_id}/frontier")

    bare = [{key: layer[key] for key in layer if key != "memory"} for layer in UNLIMITED["layers"]]
    bare[1].pop("recompute")
    plan_id = await planned(honest, {**UNLIMITED, "layers": bare})
    assert "has no memory costs" in await honest.page(f"/plans/{plan_id}/frontier")
    assert (await ask(honest, plan_id, effort="quick")).status_code == 422


async def test_a_limit_that_proves_infeasible_is_not_searched_again(serving: Serving) -> None:
    async with serving("first") as service:
        plan_id = await planned(service, UNLIMITED)
        least = (await frontier(service, plan_id)).points[0]
        plan = await service.app.state.application.plans.plan(plan_id)
    problem = layered_json(at_limit(asked_of(plan), least.at))
    # The smallest limit of interleaved stages is a heuristic, so a search may find that nothing fits.
    async with serving("tight") as service:
        record = (await service.submit(problem, effort="standard")).json()
        assert (await service.ended(record["id"]))["state"] == "infeasible"
        point = (await frontier(service, plan_id)).points[0]
        assert (point.is_searched, point.is_missing, point.best) == (True, False, None)
        text = (await service.http.get(f"/plans/{plan_id}/frontier")).text
        assert f'<a class="state infeasible" href="/searches/{record["id"]}">no plan fits</a>' in text


def cut() -> Problem:
    return parse_problem({**CUT, "memory": {"limit": [40, 35]}})


def test_a_plan_with_baselines_of_other_placements_had_a_choice_of_placements() -> None:
    plan = replace(plan_of(cut()), cut=CutCertificate("moved", 6.0, 1 / 3))
    assert asked_of(plan).placement == "v"
    classical = Baseline("1f1b", 9.0, 9.0, 0.1, (1.0, 1.0), True)
    for name in ("loop-2", "single"):
        other = replace(classical, name=name)
        assert asked_of(replace(plan, baselines=(classical, other))).placement == "auto"
    other = replace(classical, name="even-cut")
    assert asked_of(replace(plan, baselines=(classical, other))).placement == "v"


def test_a_bound_for_limits_per_rank_holds_up_to_the_smallest_limit() -> None:
    assert holds_up_to((40.0, 35.0)) == 35.0
    assert holds_up_to(None) == math.inf
