"""An incumbent that does not fit its problem is refused, and a plan below a lower bound is a bug."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update
from support.fake_searches import Listener, plan_of, stages_of
from support.layered import LAYERED
from support.serving import PROBLEM, Service, Serving
from support.stored import a_plan
from zbv_service.database import Database, PlanTable
from zbv_service.database.models import SearchRow
from zbv_service.documents.problems import answers, incumbent_of, pack, pack_plan, problem_key, question_json
from zbv_service.frontier.problems import Point, tightened
from zbv_service.problems.estimate import estimate_of_layers
from zbv_service.records.searches import Claim, Outcome
from zbv_service.searches.executors.task import search_plan, solver_search
from zbv_solver.errors import ContradictedBound, InvalidPlan
from zbv_solver.frontiers.limits import Known
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import CutCertificate, Plan
from zbv_solver.problem.reading import parse_any_problem, parse_problem
from zbv_solver.problem.writing import problem_json

OTHER_COSTS = {**PROBLEM, "costs": {"forward": 2, "backward_input": 1, "backward_weight": 1}}
EMBEDDING, BLOCK, HEAD = LAYERED["layers"]
OTHER_LAYERS = {**LAYERED, "layers": [EMBEDDING, {**BLOCK, "forward": 5}, HEAD]}


def incumbent_for(problem: Any) -> Any:
    return incumbent_of(Outcome.of(pack_plan(plan_of(stages_of(parse_any_problem(problem)))))).incumbent


UNFIT = [
    (PROBLEM, b"no zlib", "error"),
    (PROBLEM, pack(None), "TypeError"),
    (PROBLEM, pack([[1, 2], [3]]), ""),
    (PROBLEM, pack([["0F0"], []]), "InvalidPlan"),
    (PROBLEM, pack([["0X0"], []]), "InvalidInput"),
    (PROBLEM, incumbent_for({**PROBLEM, "microbatches": 5}), "InvalidPlan"),
    (LAYERED, incumbent_for(OTHER_LAYERS), "not a cut of the problem"),
    (LAYERED, incumbent_for({**LAYERED, "pp_degree": 1, "microbatches": 3}), "not a cut of the problem"),
    (LAYERED, incumbent_for({**LAYERED, "costs": {"p2p": 3}}), "not a cut of the problem"),
    (LAYERED, pack({"ranks": [["0F0"]], "problem": {}}), "InvalidInput"),
]


def a_claim(problem: bytes, options: dict[str, Any], incumbent: bytes | None) -> Claim:
    return Claim("s", 1, problem, options, incumbent, 1, False)


@pytest.mark.parametrize(
    ("problem", "incumbent", "reason"),
    UNFIT,
    ids=[f"{number}-{reason}" for number, (_, _, reason) in enumerate(UNFIT)],
)
def test_an_incumbent_that_does_not_fit_is_refused_and_the_search_starts_without_it(
    problem: Any, incumbent: bytes, reason: str
) -> None:
    given: list[Orders | Plan | None] = []

    def search(question: Any, _options: Any, _report: Any, _cancelled: Any, start: Any) -> Plan:
        given.append(start)
        return plan_of(stages_of(question))

    asked = pack(question_json(parse_any_problem(problem)))
    found = search_plan(a_claim(asked, {}, incumbent), Listener(), search)
    assert given == [None]
    assert found.refusal is not None
    assert reason in found.refusal.reason


TIGHT = {**PROBLEM, "memory": {**PROBLEM["memory"], "limit": 2}}
FORWARDS_FIRST = [
    [f"{action}{j}" for action in actions for j in range(4)]
    for actions in (("0F", "3F", "3B", "0B"), ("1F", "2F", "2B", "1B"))
]


@pytest.mark.parametrize(
    ("problem", "incumbent", "reason"),
    [
        (PROBLEM, incumbent_for(PROBLEM), None),
        (LAYERED, incumbent_for(LAYERED), None),
        (TIGHT, pack(FORWARDS_FIRST), "memory"),
    ],
)
def test_the_solver_starts_from_an_incumbent_that_fits(
    problem: Any, incumbent: bytes, reason: str | None
) -> None:
    given: list[Orders | Plan | None] = []

    def search(question: Any, options: Any, report: Any, cancelled: Any, start: Any) -> Plan:
        given.append(start)
        return solver_search(question, options, report, cancelled, start)

    asked = pack(question_json(parse_any_problem(problem)))
    listener = Listener(stops=True)
    found = search_plan(a_claim(asked, {"effort": "quick"}, incumbent), listener, search)
    assert (given == [None]) == (found.refusal is not None) == (reason is not None)
    assert found.refusal is None or (reason or "") in found.refusal.reason
    # It stops immediately, and is still at least as good as its incumbent.
    (start,) = given
    assert not isinstance(start, Plan) or found.plans[0].summary.value <= start.objective
    assert all(report.objective is not None for report in listener.reports)


def test_a_plan_of_another_problem_is_rejected() -> None:
    def foreign(*_: Any) -> Plan:
        return plan_of(stages_of(parse_any_problem(OTHER_COSTS)))

    asked = pack(question_json(parse_any_problem(PROBLEM)))
    with pytest.raises(InvalidPlan, match="another problem"):
        search_plan(a_claim(asked, {}, None), Listener(), foreign)
    layers = parse_any_problem(LAYERED)
    assert answers(layers, stages_of(layers))
    assert not answers(layers, stages_of(parse_any_problem(OTHER_LAYERS)))
    assert not answers(layers, stages_of(parse_any_problem(PROBLEM)))


async def test_after_a_restart_a_foreign_incumbent_certifies_nothing(
    serving: Serving, elsewhere: Database, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its objective and bound are better than possible for this problem; neither survives."""
    async with serving("held") as service:
        search_id = await service.begun(LAYERED)
    async with elsewhere.writing() as session:
        claims = {"objective": 1.0, "lower_bound": 1.0, "gap": 0.0, "incumbent": incumbent_for(OTHER_LAYERS)}
        await session.execute(update(SearchRow).where(SearchRow.id == search_id).values(claims))
    async with serving("held") as service:
        found = await service.until(search_id, lambda found: found["objective"] == 9)
        assert (found["state"], found["lower_bound"]) == ("running", 4)
        (directory / "release").touch()
        done = await service.ended(search_id)
        assert (done["state"], done["objective"], done["attempts"]) == ("done", 8, 2)
        assert not (directory / "resumed").exists()
        assert "zbv_refused_incumbents_total 1.0" in (await service.http.get("/metrics")).text
    (warning,) = [record for record in caplog.records if "does not fit its problem" in record.getMessage()]
    assert search_id in warning.getMessage()


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
        assert sum("started" in name for name in os.listdir(directory)) == 1, "it is not run again"
        stored = await service.http.get(failed["error"]["problem"])
        assert stored.json() == question_json(parse_any_problem(PROBLEM))
        assert "zbv_contradicted_bounds_total 1.0" in (await service.http.get("/metrics")).text
        page = await service.page(f"/searches/{failed['id']}")
        assert f'href="{failed["error"]["problem"]}"' in page
        assert (await service.http.get("/v1/searches/0/problem")).status_code == 404
        again = await service.submit()
        assert (again.status_code, again.json()["id"] != failed["id"]) == (202, True)


async def test_a_report_below_a_stored_bound_ends_the_search(serving: Serving, directory: Path) -> None:
    async with serving("undercutting") as service:
        search_id = (await service.submit()).json()["id"]
        found = await service.until(search_id, lambda found: found["objective"] is not None)
        assert (found["objective"], found["lower_bound"]) == (9, 8.5)
        (directory / "release").touch()
        failed = await service.ended(search_id)
        require_report(failed, "the objective 8", "the lower bound 8.5", "an earlier report")
        assert "zbv_contradicted_bounds_total 1.0" in (await service.http.get("/metrics")).text


def test_a_plan_with_a_bound_above_its_objective_is_not_stored() -> None:
    plan = plan_of(parse_problem(PROBLEM))  # its span is 8
    too_high = replace(plan, metrics=replace(plan.metrics, lower_bound=9.0, gap=0.0, status="optimal"))
    cut = replace(plan, cut=CutCertificate("even", 9.0, 0.0))
    for stated in (too_high, cut):
        with pytest.raises(ContradictedBound, match=r"objective 8, below the lower bound 9"):
            pack_plan(stated)


async def test_a_stored_plan_below_the_bound_of_its_problem_is_not_compared(
    service: Service, elsewhere: Database
) -> None:
    document = problem_json(parse_problem(PROBLEM))
    await PlanTable(elsewhere).add(a_plan("p", 0.5, problem_key(document), lower_bound=0.5))
    answer = await service.http.post("/v1/problems/compare", json={"problem": PROBLEM})
    assert (answer.status_code, answer.json()["type"]) == (500, "/errors/contradicted-bound")
    assert "the objective 0.5" in answer.json()["detail"]
    assert "zbv_contradicted_bounds_total 1.0" in (await service.http.get("/metrics")).text


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
