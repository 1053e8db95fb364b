"""The comparison: its schedules and offers, reasons for missing schedules, and differences of problems."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from support.cut_models import cut_problem
from support.problems import problems, uniform
from support.serving import PROBLEM, Service
from zbv_service.pages.compare import differences
from zbv_service.plans import compared as compared_plans
from zbv_service.plans.compared import MOST, USUAL
from zbv_solver.construct.baselines import BASELINES, merge_stages
from zbv_solver.export.timeline import timeline, timeline_bytes
from zbv_solver.problem.problem import Problem, Units
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.assemble import baseline_plan

AGAIN = '<meta http-equiv="refresh"'


async def page_of(service: Service, plan_id: str, *names: str) -> str:
    """The page once its schedules are made: until then it asks a browser to come again."""
    while True:
        answer = await service.http.get(f"/plans/{plan_id}/compare", params={"with": names} if names else {})
        assert answer.status_code == 200, answer.text
        if AGAIN not in answer.text:
            return answer.text
        assert "Computing" in answer.text
        assert "chart-lanes" not in answer.text


def lanes(page: str) -> list[dict[str, Any]]:
    found: Any = re.search(r'id="chart-lanes">(.*?)</script>', page, re.DOTALL)
    made: list[dict[str, Any]] = json.loads(found[1])
    return made


def titles(page: str) -> list[str]:
    return [lane["title"].partition(":")[0] for lane in lanes(page)]


def chosen(page: str) -> list[str]:
    return re.findall(r'value="([^"]+)" checked', page)


async def test_a_plan_is_compared_with_the_schedules_that_are_chosen(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The actions that are drawn are those schedules' own; stored plans are offered, those alike first."""
    plan_id = await service.import_plan()
    with monkeypatch.context() as patch:
        patch.setattr(compared_plans, "PATIENCE_SECONDS", 0.0)
        address = f"/plans/{plan_id}/compare?with=1f1b&with=gpipe"
        awaited = (await service.http.get(address)).text
    assert AGAIN in awaited
    assert "Computing 1f1b, gpipe for this problem" in awaited
    assert chosen(awaited) == ["gpipe", "1f1b"]
    assert titles(await page_of(service, plan_id)) == ["this plan", *USUAL]
    assert titles(await page_of(service, plan_id, *BASELINES)) == ["this plan", *BASELINES]
    page = await page_of(service, plan_id, "gpipe", "gpipe", "")
    assert (titles(page), chosen(page)) == (["this plan", "gpipe"], ["gpipe"])
    assert len(re.findall(r'<th scope="row">', page.split('<h2 id="numbers">')[1])) == 2
    assert titles(await page_of(service, plan_id, "")) == ["this plan"], "none is wanted"

    url = lanes(await page_of(service, plan_id, "zb-h1"))[1]["url"]
    expected = timeline(baseline_plan("zb-h1", parse_problem(PROBLEM)))
    assert (await service.http.get(url)).content == timeline_bytes(expected)
    for missing in (f"/plans/{plan_id}/baselines/2f2b/actions", f"/plans/{'0' * 64}/compare"):
        assert (await service.http.get(missing)).status_code == 404

    alike = await service.import_plan({**PROBLEM, "objective": "makespan"})
    other = await service.import_plan({**PROBLEM, "microbatches": 6})
    page = await page_of(service, plan_id)
    groups = dict(re.findall(r'<optgroup label="([^"]+)">(.*?)</optgroup>', page, re.DOTALL))
    assert alike in groups["Same shape"]
    assert other in groups["Others"]
    assert plan_id not in "".join(groups.values())


async def test_differences_of_problems_are_listed_and_failed_schedules_have_reasons(service: Service) -> None:
    plan_id = await service.import_plan()
    costs = {"forward": 2, "backward_input": 1, "backward_weight": 1}
    other = await service.import_plan({**PROBLEM, "costs": costs, "microbatches": 6})
    page = await page_of(service, plan_id, other)
    assert titles(page) == ["this plan", f"plan {other[:12]}"]
    assert "solves a different problem" in page
    lines = re.findall(r'<tr><th scope="row">([^<]+)</th><td>([^<]+)</td><td>([^<]+)</td></tr>', page)
    assert lines == [("microbatches", "4", "6"), ("forward F", "1", "2")]

    weighed = await service.import_plan({**PROBLEM, "units": {"memory": "bytes"}})
    page = await page_of(service, plan_id, weighed)
    (line,) = re.findall(rf'<th scope="row"><a href="/plans/{weighed}">.*?</tr>', page, re.DOTALL)
    assert re.search(r"<td>[\d.]+ B</td>", line), "the other plan's own unit"
    assert not re.search('class="(yes|no)"', line), "nobody knows whether bytes fit another limit"

    timed = await service.import_plan({**PROBLEM, "units": {"time": "us"}})
    page = await page_of(service, plan_id, timed, "0" * 64, '"><script>', "1f1b")
    assert titles(page) == ["this plan", "1f1b"]
    assert "its times are in us, those of this plan in no unit" in page
    assert "found no plan" in page
    assert not re.search("<script>['&]", page)
    page = await page_of(service, plan_id, *(f"{digit:064x}" for digit in range(MOST)), "1f1b")
    assert f"at most {MOST} schedules" in page


@given(problems(), problems())
def test_only_different_problems_have_differences(one: Problem, other: Problem) -> None:
    assert differences(one, one) == []
    assert bool(differences(one, other)) == (one != other)
    names = [name for name, _, _ in differences(one, other)]
    assert [name for name, _, _ in differences(other, one)] == names


def forward(p: int, *values: float) -> Problem:
    one = uniform(p, 4)
    return replace(one, costs=replace(one.costs, forward=values))


def by_tokens(tokens: list[int], scale: float = 1) -> Problem:
    costs = {"forward": {"tokens": scale}, "backward_input": 1, "backward_weight": 1}
    return parse_problem({"pp_degree": 2, "microbatches": 2, "features": {"tokens": tokens}, "costs": costs})


MANY = replace(uniform(2, 6, limit=8, p2p=0.5, objective="makespan"), units=Units(time="us", memory="bytes"))
EVEN, UNEVEN = (cut_problem("abcd", sizes) for sizes in ([1, 1, 1, 1], [2, 0, 1, 1]))


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (uniform(2, 4, limit=8), MANY,
         [("microbatches", "4", "6"), ("objective", "span", "makespan"), ("time unit", "none", "us"),
          ("memory unit", "none", "bytes"), ("transfer", "0", "0.5")]),
        (forward(2, 1, 2, 1, 1), forward(2, 1, 1, 2, 1), [("forward F", "1 to 2", "1 to 2, 2 of 4 differ")]),
        (forward(2, 1, 2, 1, 1), forward(2, 1, 2 + 1e-14, 1, 1), []),  # rounding
        (EVEN, replace(EVEN, model=None), [("layers", "4 in 4 stages", "none")]),
        (by_tokens([1, 3]), by_tokens([1, 3], 2), [("forward F", "1 to 3", "2 to 6")]),
        # These differ in more.
        (forward(2, 1, 1, 1, 2), forward(3, 1, 1, 1, 1, 1, 2),
         [..., ("forward F", "1 to 2, 4 values", "1 to 2, 6 values")]),
        (EVEN, UNEVEN, [..., ("layers", "4 in 4 stages", "4 in 4 stages, different layers or stages")]),
        (uniform(2, 4), merge_stages(uniform(2, 4)), [..., ("forward F", "1", "2")]),
        (by_tokens([1, 3]), by_tokens([3, 1]), [..., ("forward F", "1 to 3", "1 to 3, 8 of 8 differ")]),
        (by_tokens([1, 3]), replace(by_tokens([1, 3]), features=()),
         [..., ("features", "tokens 1 to 3", "none")]),
    ],
)  # fmt: skip
def test_a_difference_has_both_sides(one: Problem, other: Problem, expected: list[Any]) -> None:
    found = differences(one, other)
    assert expected[-1] in found if expected[:1] == [...] else found == expected
