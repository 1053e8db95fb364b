"""The comparison: its schedules, its offers, and the reasons for missing schedules."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from support.runs_over_http import import_plan
from support.serving import PROBLEM, Service, Serving
from zbv_service.plans import compared as compared_plans
from zbv_service.plans.compared import MOST, USUAL
from zbv_solver.construct.baselines import BASELINES
from zbv_solver.export.timeline import timeline, timeline_bytes
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.assemble import baseline_plan

pytestmark = pytest.mark.anyio

TIMED = {**PROBLEM, "units": {"time": "us"}}


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
    found = re.search(r'id="chart-lanes">(.*?)</script>', page, re.DOTALL)
    assert found is not None, page
    made: list[dict[str, Any]] = json.loads(found[1])
    return made


def titles(page: str) -> list[str]:
    return [lane["title"].partition(":")[0] for lane in lanes(page)]


async def test_a_plan_is_compared_with_the_usual_schedules_by_default(serving: Serving) -> None:
    """The actions that are drawn are those schedules' own; stored plans are offered, those alike first."""
    async with serving("immediate") as service:
        plan_id = await import_plan(service)
        assert titles(await page_of(service, plan_id)) == ["this plan", *USUAL]
        assert titles(await page_of(service, plan_id, *BASELINES)) == ["this plan", *BASELINES]
        page = await page_of(service, plan_id, "gpipe", "gpipe", "")
        assert titles(page) == ["this plan", "gpipe"]
        assert titles(await page_of(service, plan_id, "")) == ["this plan"], (
            "the form says that none is wanted"
        )
        assert re.findall(r'value="([^"]+)" checked', page) == ["gpipe"]

        found = lanes(await page_of(service, plan_id, "zb-h1"))
        answer = await service.http.get(found[1]["url"])
        expected = timeline(baseline_plan("zb-h1", parse_problem(PROBLEM)))
        assert answer.content == timeline_bytes(expected)
        assert found[1]["facts"]["count"] == len(expected)
        again = await service.http.get(found[1]["url"], headers={"If-None-Match": answer.headers["etag"]})
        assert again.status_code == 304
        assert (await service.http.get(f"/plans/{plan_id}/baselines/2f2b/actions")).status_code == 404

        alike = await import_plan(service, {**PROBLEM, "objective": "makespan"})
        other = await import_plan(service, {**PROBLEM, "microbatches": 6})
        page = await page_of(service, plan_id)
        groups = dict(re.findall(r'<optgroup label="([^"]+)">(.*?)</optgroup>', page, re.DOTALL))
        assert alike in groups["Same shape"]
        assert other in groups["Others"]
        assert plan_id not in "".join(groups.values())


async def test_differences_of_problems_are_listed_and_schedules_that_fail_have_a_reason(
    serving: Serving,
) -> None:
    async with serving("immediate") as service:
        plan_id = await import_plan(service)
        costs = {"forward": 2, "backward_input": 1, "backward_weight": 1}
        other = await import_plan(service, {**PROBLEM, "costs": costs, "microbatches": 6})
        page = await page_of(service, plan_id, other)
        assert titles(page) == ["this plan", f"plan {other[:12]}"]
        assert "solves a different problem" in page
        lines = re.findall(r'<tr><th scope="row">([^<]+)</th><td>([^<]+)</td><td>([^<]+)</td></tr>', page)
        assert ("microbatches", "4", "6") in lines
        assert ("forward F", "1", "2") in lines
        assert [name for name, _, _ in lines] == ["microbatches", "forward F"]

        weighed = await import_plan(service, {**PROBLEM, "units": {"memory": "bytes"}})
        page = await page_of(service, plan_id, weighed)
        (line,) = re.findall(rf'<th scope="row"><a href="/plans/{weighed}">.*?</tr>', page, re.DOTALL)
        assert re.search(r"<td>[\d.]+ B</td>", line), "the other plan's own unit"
        assert 'class="yes"' not in line, "nobody knows whether bytes fit a limit in something else"
        assert 'class="no"' not in line

        timed = await import_plan(service, TIMED)
        page = await page_of(service, plan_id, timed, "0" * 64, '"><script>', "1f1b")
        assert titles(page) == ["this plan", "1f1b"]
        assert "its times are in us, those of this plan in no unit" in page
        assert "found no plan" in page
        assert "<script>'" not in page
        assert '"><script>' not in page
        page = await page_of(service, plan_id, *(f"{digit:064x}" for digit in range(MOST)), "1f1b")
        assert f"at most {MOST} schedules" in page
        assert (await service.http.get(f"/plans/{'0' * 64}/compare")).status_code == 404


async def test_schedules_that_take_long_are_awaited(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compared_plans, "PATIENCE_SECONDS", 0.0)
    async with serving("immediate") as service:
        plan_id = await import_plan(service)
        answer = await service.http.get(f"/plans/{plan_id}/compare", params={"with": ["1f1b", "gpipe"]})
        assert answer.status_code == 200
        assert AGAIN in answer.text
        assert "Computing 1f1b, gpipe for this problem" in answer.text
        assert re.findall(r'value="([^"]+)" checked', answer.text) == ["gpipe", "1f1b"]
        assert titles(await page_of(service, plan_id, "1f1b", "gpipe")) == ["this plan", "1f1b", "gpipe"]
