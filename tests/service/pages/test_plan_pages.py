"""The page of a plan as it is served: what its chart loads, how long that is kept, where it leads."""

from __future__ import annotations

import json
import re

import httpx
import pytest
from support.runs_over_http import import_plan
from support.serving import PROBLEM, Serving
from zbv_service.api.caching import IMMUTABLE
from zbv_service.pages.assets import assets
from zbv_service.pages.plan import plan_page
from zbv_service.pages.shell import Shell
from zbv_solver.export import report
from zbv_solver.export.timeline import timeline, timeline_bytes, timeline_facts
from zbv_solver.plans.reading import parse_plan
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.assemble import baseline_plan

pytestmark = pytest.mark.anyio

UNKNOWN = "0" * 64


async def test_a_chart_loads_the_actions_of_its_plan_once(serving: Serving) -> None:
    async with serving("immediate") as service:
        plan_id = await import_plan(service)
        plan = parse_plan((await service.http.get(f"/v1/plans/{plan_id}")).json())
        page = await service.http.get(f"/plans/{plan_id}")
        assert page.status_code == 200
        [facts] = re.findall(r'id="chart-timeline">([^<]+)<', page.text)
        assert json.loads(facts) == timeline_facts(timeline(plan), plan.problem)
        [address] = re.findall(r'data-actions="([^"]+)"', page.text)
        assert f'<link rel="preload" as="fetch" href="{address}"' in page.text

        found = await service.http.get(address)
        assert found.content == timeline_bytes(timeline(plan))
        assert found.headers["content-type"] == "application/octet-stream"
        assert found.headers["cache-control"] == IMMUTABLE
        again = await service.http.get(address, headers={"If-None-Match": found.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("path", ["", "/actions"])
async def test_an_unknown_plan_is_not_found(serving: Serving, path: str) -> None:
    async with serving("immediate") as service:
        assert (await service.http.get(f"/plans/{UNKNOWN}{path}")).status_code == 404


async def test_scripts_and_styles_are_immutable_below_their_version(
    serving: Serving,
) -> None:
    async with serving("immediate") as service:
        plan_id = await import_plan(service)
        page = await service.http.get(f"/plans/{plan_id}")
        addresses = re.findall(r'(?:src|href)="(/static/[^"]+)"', page.text)
        names = [address.removeprefix(f"/static/{assets()}/") for address in addresses]
        assert [name for name in names if name in report.MODULES] == [*report.MODULES, "plan.js"]
        assert {"zbv.css", "pages.css", "chart.css", "theme.js", "icon.svg"} <= set(names)
        for address in addresses:
            kept = await service.http.get(address)
            assert kept.status_code == 200, address
            assert "immutable" in kept.headers["cache-control"], address
        older = f"/static/{'0' * 12}/plan.js"
        for other in ("/static/plan.js", older, f"/static/plan.js?v={assets()}"):
            changing = await service.http.get(other)
            assert changing.status_code == 200, other
            assert changing.headers["cache-control"] == "no-cache", other
        missing = await service.http.get(f"/static/{assets()}/nothing.js")
        assert missing.status_code == 404
        assert "immutable" not in missing.headers.get("cache-control", "")


async def test_every_module_imports_only_what_the_page_preloads(serving: Serving) -> None:
    async with serving("immediate") as service:
        for at, name in enumerate(report.MODULES):
            text = (await service.http.get(f"/static/{assets()}/{name}")).text
            imported = re.findall(r'^import .* from "\./([^"]+)";', text, re.MULTILINE)
            assert set(imported) <= set(report.MODULES[:at]), name


async def test_scripts_travel_compressed_to_clients_that_accept_it(serving: Serving) -> None:
    async with serving("immediate") as service:
        address = f"/static/{assets()}/timeline.js"
        plain = await service.http.get(address, headers={"Accept-Encoding": "identity"})
        packed = await service.http.get(address, headers={"Accept-Encoding": "gzip"})
        assert packed.content == plain.content
        assert packed.headers["content-encoding"] == "gzip"
        assert packed.headers["vary"] == "Accept-Encoding"
        assert packed.headers["content-type"] == plain.headers["content-type"]
        assert "content-encoding" not in plain.headers
        again = await service.http.get(address, headers={"If-None-Match": plain.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        head = await service.http.head(address)
        assert (head.status_code, head.content) == (200, b"")


async def test_every_address_is_under_the_prefix_of_a_proxy(serving: Serving) -> None:
    async with serving("immediate") as service:
        plan_id = await import_plan(service)
        transport = httpx.ASGITransport(service.app, root_path="/planner")
        async with httpx.AsyncClient(transport=transport, base_url="http://zbv") as behind:
            page = await behind.get(f"/planner/plans/{plan_id}")
    addresses = re.findall(r'(?:src|href|action|data-actions)="(/[^"]*)"', page.text)
    assert len(addresses) > 20
    assert [address for address in addresses if not address.startswith("/planner/")] == []


def test_a_reader_without_the_scope_search_gets_no_link_to_the_form() -> None:
    view = report.plan_view(baseline_plan("1f1b", parse_problem(PROBLEM)))
    for scopes, is_invited in ((frozenset(), True), (frozenset({"read"}), False), ({"read", "search"}, True)):
        text = plan_page(view, Shell(may=frozenset(scopes))).decode()
        assert ("Change and search again" in text) == is_invited
        assert f"/plans/{view.plan_id}/compare" in text
