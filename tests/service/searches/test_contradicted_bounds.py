"""A plan that undercuts a lower bound is a bug: the search fails with an error that says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.fake_searches import plan_of
from support.layered import LAYERED
from support.serving import PROBLEM, Service, Serving
from support.stored import a_plan
from zbv_service.database import Database, PlanTable
from zbv_service.documents.problems import pack, pack_plan, problem_key, question_json
from zbv_service.frontier.points import Point, tightened
from zbv_service.problems.estimate import estimate_of_layers
from zbv_service.settings import Settings
from zbv_solver.errors import ContradictedBound
from zbv_solver.frontiers.limits import Known
from zbv_solver.plans.plan import CutCertificate
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_any_problem, parse_problem
from zbv_solver.problem.writing import problem_json


async def counted(service: Service, name: str) -> float:
    text = (await service.http.get("/metrics")).text
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name} "))


def count(directory: Path, pattern: str) -> int:
    return len(list(directory.glob(pattern)))


def require_report(failed: dict[str, Any], *numbers: str) -> None:
    """The error has its own type, names the objective and the bound, and links to the problem."""
    error = failed["error"]
    assert (failed["state"], failed["plan_id"]) == ("failed", None)
    assert (error["type"], error["status"]) == ("/errors/contradicted-bound", 500)
    assert error["problem"] == f"/v1/searches/{failed['id']}/problem"
    for said in (*numbers, error["problem"], "please report it"):
        assert said in error["detail"]


async def test_a_search_with_a_contradicted_bound_fails_once_and_keeps_its_problem(
    serving: Serving, directory: Path
) -> None:
    async with serving("contradicted") as service:
        failed = await service.done()
        require_report(failed, "the objective 7", "the lower bound 8", "cp-sat")
        assert (failed["error"]["objective"], failed["error"]["lower_bound"]) == (7, 8)
        assert failed["attempts"] == 1
        assert count(directory, "started-*") == 1, "it is not run again"
        stored = await service.http.get(failed["error"]["problem"])
        assert stored.json() == question_json(parse_any_problem(PROBLEM))
        assert await counted(service, "zbv_contradicted_bounds_total") == 1
        page = (await service.http.get(f"/searches/{failed['id']}")).text
        assert "A verified plan undercuts a lower bound" in page
        assert f'href="{failed["error"]["problem"]}"' in page
        assert (await service.http.get("/v1/searches/0/problem")).status_code == 404
        again = await service.submit()
        assert (again.status_code, again.json()["id"] != failed["id"]) == (202, True)


async def test_a_report_that_undercuts_a_stored_bound_ends_the_search(
    serving: Serving, directory: Path
) -> None:
    async with serving("undercutting") as service:
        search_id = (await service.submit()).json()["id"]
        found = await service.until(search_id, lambda found: found["objective"] is not None)
        assert (found["objective"], found["lower_bound"]) == (9, 8.5)
        (directory / "release").touch()
        failed = await service.ended(search_id)
        require_report(failed, "the objective 8", "the lower bound 8.5", "an earlier report")
        # One of the two is wrong, so neither is shown.
        assert (failed["objective"], failed["lower_bound"], failed["gap"]) == (None, None, None)
        events = await service.http.get(
            f"/v1/searches/{search_id}/events", headers={"Accept": "application/json"}
        )
        assert events.json()["events"][-1]["error"]["type"] == "/errors/contradicted-bound"
        assert await counted(service, "zbv_contradicted_bounds_total") == 1
        assert await service.listed("plans") == []


def test_a_plan_with_a_bound_above_its_objective_is_not_stored() -> None:
    problem = parse_any_problem(PROBLEM)
    assert isinstance(problem, Problem)
    plan = plan_of(problem)  # its span is 8
    too_high = replace(plan, metrics=replace(plan.metrics, lower_bound=9.0, gap=0.0, status="optimal"))
    cut = replace(plan, cut=CutCertificate("even", 9.0, 0.0))
    for stated in (too_high, cut):
        with pytest.raises(ContradictedBound, match=r"objective 8, below the lower bound 9"):
            pack_plan(stated)


async def test_a_stored_plan_below_the_bound_of_its_problem_is_not_compared(
    serving: Serving, settings: Settings
) -> None:
    document = problem_json(parse_problem(PROBLEM))
    database = Database(settings.database)
    await PlanTable(database).add(a_plan("p", 0.5, problem_key(document), lower_bound=0.5))
    await database.close()
    async with serving("immediate") as service:
        answer = await service.http.post("/v1/problems/compare", json={"problem": PROBLEM})
        assert (answer.status_code, answer.json()["type"]) == (500, "/errors/contradicted-bound")
        assert "the objective 0.5" in answer.json()["detail"]
        assert await counted(service, "zbv_contradicted_bounds_total") == 1


def test_an_estimate_below_the_bound_over_all_cuts_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zbv_solver.frontiers.frontier.floor", lambda _problem: 1e9)
    with pytest.raises(ContradictedBound, match="the bound of every cut"):
        estimate_of_layers(pack(question_json(parse_any_problem(LAYERED))))


def test_a_frontier_with_a_plan_below_its_bound_is_not_shown() -> None:
    def points(*bounds: float) -> list[Point]:
        best = Known("plan", 1.0, 100.0)
        return [Point(at, 8.0 * at, best, bound, None, True) for at, bound in enumerate(bounds, 1)]

    assert [point.bound for point in tightened(points(99.0, 90.0))] == [99, 90]
    (rounded,) = tightened(points(100.0 * (1 + 1e-12)))
    assert (rounded.bound, rounded.is_proved) == (100, True)
    for bounds in ((101.0,), (99.0, 101.0)):  # the bound for a larger limit also holds for a smaller one
        with pytest.raises(ContradictedBound, match="the memory limit 8"):
            tightened(points(*bounds))
