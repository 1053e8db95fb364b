"""A stored incumbent that does not fit the problem neither becomes the answer nor fails the search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update
from support.fake_searches import plan_of, stages_of
from support.layered import LAYERED
from support.serving import PROBLEM, Serving
from zbv_service.database import Database
from zbv_service.database.models import SearchRow
from zbv_service.documents.problems import answers, incumbent_of, pack, pack_plan, question_json
from zbv_service.records.searches import Claim
from zbv_service.searches.executors.task import search_plan, solver_search
from zbv_service.settings import Settings
from zbv_solver.errors import InvalidPlan
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.reading import parse_any_problem

OTHER_COSTS = {**PROBLEM, "costs": {"forward": 2, "backward_input": 1, "backward_weight": 1}}
OTHER_LAYERS = {
    **LAYERED,
    "layers": [LAYERED["layers"][0], {**LAYERED["layers"][1], "forward": 5}, LAYERED["layers"][2]],
}


def incumbent_for(problem: Any) -> bytes:
    packed = incumbent_of(pack_plan(plan_of(stages_of(parse_any_problem(problem))))).incumbent
    assert packed is not None
    return packed


UNFIT = [
    (PROBLEM, b"", "error"),
    (PROBLEM, b"no zlib", "error"),
    (PROBLEM, pack(None), "TypeError"),
    (PROBLEM, pack({}), "KeyError"),
    (PROBLEM, pack([[1, 2], [3]]), ""),
    (PROBLEM, pack([["0F0"], []]), "InvalidPlan"),
    (PROBLEM, pack([["0X0"], []]), "InvalidInput"),
    (PROBLEM, incumbent_for({**PROBLEM, "microbatches": 5}), "InvalidPlan"),
    (PROBLEM, incumbent_for({**PROBLEM, "pp_degree": 3}), "InvalidPlan"),
    (PROBLEM | {"memory": {**PROBLEM["memory"], "limit": 2}}, pack(None), "TypeError"),
    (LAYERED, incumbent_for(OTHER_LAYERS), "not a cut of the problem"),
    (LAYERED, incumbent_for({**LAYERED, "pp_degree": 1, "microbatches": 3}), "not a cut of the problem"),
    (LAYERED, incumbent_for({**LAYERED, "costs": {"p2p": 3}}), "not a cut of the problem"),
    (LAYERED, pack({"ranks": [["0F0"]], "problem": {}}), "InvalidInput"),
]


def a_claim(problem: bytes, options: dict[str, Any], incumbent: bytes | None) -> Claim:
    return Claim("s", 1, problem, options, incumbent, 1, False)


class Tie:
    """A reporter without a service."""

    def report(self, make: Any) -> None:
        pass

    def is_stopped(self) -> bool:
        return False


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
    found = search_plan(a_claim(asked, {}, incumbent), Tie(), search)
    assert given == [None]
    assert found.refusal is not None
    assert reason in found.refusal.reason


@pytest.mark.parametrize("problem", [PROBLEM, LAYERED])
def test_a_search_starts_from_an_incumbent_that_fits(problem: Any) -> None:
    asked = pack(question_json(parse_any_problem(problem)))
    found = search_plan(a_claim(asked, {"effort": "quick"}, incumbent_for(problem)), Tie(), solver_search)
    assert found.refusal is None


def test_an_incumbent_that_overflows_memory_is_refused() -> None:
    tight = {**PROBLEM, "memory": {**PROBLEM["memory"], "limit": 2}}
    all_forwards_first = [
        [f"{action}{j}" for action in actions for j in range(4)]
        for actions in (("0F", "3F", "3B", "0B"), ("1F", "2F", "2B", "1B"))
    ]
    asked = pack(question_json(parse_any_problem(tight)))
    task = a_claim(asked, {"effort": "quick"}, pack(all_forwards_first))
    found = search_plan(task, Tie(), solver_search)
    assert found.refusal is not None
    assert "memory" in found.refusal.reason


def test_a_plan_of_another_problem_is_rejected() -> None:
    def foreign(*_: Any) -> Plan:
        return plan_of(stages_of(parse_any_problem(OTHER_COSTS)))

    asked = pack(question_json(parse_any_problem(PROBLEM)))
    with pytest.raises(InvalidPlan, match="another problem"):
        search_plan(a_claim(asked, {}, None), Tie(), foreign)
    layers = parse_any_problem(LAYERED)
    assert answers(layers, stages_of(layers))
    assert not answers(layers, stages_of(parse_any_problem(OTHER_LAYERS)))
    assert not answers(layers, stages_of(parse_any_problem(PROBLEM)))


@pytest.mark.parametrize(
    ("problem", "foreign"), [(PROBLEM, {**PROBLEM, "microbatches": 5}), (LAYERED, OTHER_LAYERS)]
)
async def test_after_a_restart_a_foreign_incumbent_certifies_nothing(
    serving: Serving,
    settings: Settings,
    directory: Path,
    problem: Any,
    foreign: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its objective and bound are better than possible for this problem; neither survives."""
    async with serving("held") as service:
        search_id = await service.begun(problem)
    database = Database(settings.database)
    async with database.writing() as session:
        claims = {"objective": 1.0, "lower_bound": 1.0, "gap": 0.0, "incumbent": incumbent_for(foreign)}
        await session.execute(update(SearchRow).where(SearchRow.id == search_id).values(claims))
    await database.close()
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
