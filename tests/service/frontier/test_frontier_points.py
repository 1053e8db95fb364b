"""Frontiers over HTTP: stored plans are found, and missing points are searched once."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
from support.frontiers import ask, frontier, planned
from support.serving import PROBLEM, Service, Serving
from zbv_service.documents.problems import problem_key
from zbv_service.frontier.points import Point
from zbv_service.frontier.problems import problems_of_stages
from zbv_service.pages.frontier import picture_of
from zbv_solver.frontiers import memory_fraction
from zbv_solver.frontiers.limits import Known
from zbv_solver.problem.reading import parse_problem
from zbv_solver.problem.writing import problem_json

LEAST = memory_fraction.smallest(parse_problem(PROBLEM))


def at(fraction: float) -> dict[str, Any]:
    return problem_json(memory_fraction.at_fraction(parse_problem(PROBLEM), fraction))


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
    assert values == sorted(values, reverse=True)
    bounds = [point.bound for point in found.points if point.bound is not None]
    # A bound for little memory does not hold for more memory.
    assert all(bound <= value * (1 + 1e-9) for bound, value in zip(bounds, values, strict=True))
    assert len(bounds) == len(found.points)
    assert bounds == sorted(bounds, reverse=True)
    assert all(point.bound <= point.best.value for point in found.points if point.best and point.bound)

    page = await honest.http.get(f"/plans/{own}/frontier")
    assert page.status_code == 200
    assert page.text.count('class="asked ') == len(found.points)
    for plan_id in (tight, own):
        assert re.search(rf'<a href="/plans/{plan_id}" aria-label="', page.text)
    assert "unsafe-inline" not in page.headers["content-security-policy"]


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
    between = await planned(honest, at(1.1))
    unlimited = {**PROBLEM, "memory": {**PROBLEM["memory"], "limit": None}}
    other = await planned(honest, unlimited)
    own = await planned(honest, at(LEAST))
    names = {plan.name for plan in (await frontier(honest, own)).plans}
    assert names >= {between, other, own}


async def test_missing_points_are_searched_once(honest: Service) -> None:
    plan_id = await planned(honest, at(1.0))
    missing = (await frontier(honest, plan_id)).missing
    assert missing
    answer = await ask(honest, plan_id, effort="quick")
    assert (answer.status_code, answer.headers["location"]) == (303, f"/plans/{plan_id}/frontier")
    searches = await honest.listed("searches")
    assert len(searches) == 1 + len(missing)
    for search in searches:
        await honest.ended(search["id"])
    found = await frontier(honest, plan_id)
    assert not found.missing
    assert not found.open
    await ask(honest, plan_id, effort="quick")
    assert len(await honest.listed("searches")) == 1 + len(missing)

    unproved = sum(not point.is_proved for point in found.points)
    answer = await ask(honest, plan_id, effort="quick", again="1")
    assert answer.headers["location"] == f"/plans/{plan_id}/frontier?known={unproved}"
    page = await honest.http.get(answer.headers["location"])
    assert "already searched with that effort" in page.text
    answer = await ask(honest, plan_id, effort="standard", again="1")
    assert answer.headers["location"] == f"/plans/{plan_id}/frontier"
    assert len(await honest.listed("searches")) == 1 + len(missing) + unproved


async def test_a_caller_with_too_many_searches_sees_the_number_of_refused_points(serving: Serving) -> None:
    async with serving("honest") as service:
        plan_id = await planned(service, at(1.0))
    async with serving("held", max_searches_per_token=2) as service:
        missing = len((await frontier(service, plan_id)).missing)
        answer = await ask(service, plan_id, effort="quick")
        refused = missing - 2
        assert answer.headers["location"].endswith(f"?refused={refused}")
        page = await service.http.get(answer.headers["location"])
        assert f"{refused} point" in page.text
        assert "data-again" in page.text
        assert "data-open" in page.text
        found = await frontier(service, plan_id)
        assert (len(found.open), len(found.missing)) == (2, refused)


async def test_wrong_forms_are_refused_and_a_problem_without_memory_gets_advice(serving: Serving) -> None:
    async with serving("honest", max_effort="quick") as service:
        plan_id = await planned(service, at(1.0))
        for form in ({"effort": "standard"}, {"effort": "enormous"}):
            answer = await ask(service, plan_id, **form)
            assert answer.status_code == 422
            assert "effort" in answer.text
        assert (await ask(service, "0" * 64, effort="quick")).status_code == 404
        assert (await service.http.get(f"/plans/{'0' * 64}/frontier")).status_code == 404
        assert (await service.http.get(f"/plans/{plan_id}/frontier?refused=-1")).status_code == 422
        page = await service.http.get(f"/plans/{plan_id}/frontier")
        assert "<option selected>quick</option>" in page.text
        assert "standard</option>" not in page.text

        plan_id = await planned(service, {name: PROBLEM[name] for name in PROBLEM if name != "memory"})
        page = await service.http.get(f"/plans/{plan_id}/frontier")
        assert page.status_code == 200
        assert "has no memory costs" in page.text
        assert (await ask(service, plan_id, effort="quick")).status_code == 422


async def test_schedules_at_the_same_place_share_a_mark(honest: Service) -> None:
    plan_id = await planned(honest, at(1.0))
    found = await frontier(honest, plan_id)
    twins = tuple(Known(name, 1.0, found.own.value) for name in ("one", "other"))
    apart = Known("apart", 1.5, found.own.value)
    marks = picture_of(replace(found, baselines=(*twins, apart)), "")["marks"]
    assert [(mark["name"], mark["is_left"]) for mark in marks if mark["style"] == "baseline"] == [
        ("one, other", False),
        ("apart", True),
    ]
    assert all(0 <= mark["x"] <= 100 and 0 <= mark["y"] <= 100 for mark in marks)
