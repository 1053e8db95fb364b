"""The page of a plan as it is served: what its chart loads, how long that is kept, where it leads."""

from __future__ import annotations

import json
import re

import httpx
import pytest
from support.runs_over_http import import_plan
from support.serving import PROBLEM, Serving
from zbv_service.api.caching import IMMUTABLE
from zbv_service.pages.shell import BOKEH_VERSION, Shell, assets
from zbv_service.pages.views.plan import plan_page
from zbv_solver.export import report
from zbv_solver.export.timeline import timeline
from zbv_solver.export.timeline_data import timeline_bytes, timeline_facts
from zbv_solver.plans.plan import parse_plan
from zbv_solver.problem.stage_document import parse_problem
from zbv_solver.search.search import baseline_plan

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
        [chart] = re.findall(r'data-chart="([^"]+)"', page.text)
        assert f'<link rel="preload" as="fetch" href="{chart}"' in page.text
        drawn = await service.http.get(chart)
        assert set(drawn.json()) == {"item", "rules"}
        assert drawn.headers["cache-control"] == IMMUTABLE
        [address] = re.findall(r'data-actions="([^"]+)"', page.text)
        assert f'<link rel="preload" as="fetch" href="{address}"' in page.text

        found = await service.http.get(address)
        assert found.content == timeline_bytes(timeline(plan))
        assert found.headers["content-type"] == "application/octet-stream"
        assert found.headers["cache-control"] == IMMUTABLE
        again = await service.http.get(address, headers={"If-None-Match": found.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("path", ["", "/actions", "/chart"])
async def test_what_is_not_there_is_not_found(serving: Serving, path: str) -> None:
    async with serving("immediate") as service:
        assert (await service.http.get(f"/plans/{UNKNOWN}{path}")).status_code == 404


async def test_scripts_and_styles_are_kept_for_good_under_the_address_of_their_version(
    serving: Serving,
) -> None:
    async with serving("immediate") as service:
        plan_id = await import_plan(service)
        page = await service.http.get(f"/plans/{plan_id}")
        addresses = re.findall(r'(?:src|href|data-bokeh)="(/static/[^"?]+)\?v=([^"]+)"', page.text)
        names = [address.removeprefix("/static/") for address, _ in addresses]
        scripts = [name for name in names if name in report.SCRIPTS]
        assert scripts == list(report.SCRIPTS)
        assert {"zbv.css", "chart.css", "theme.js", "bokeh/js/bokeh.min.js"} <= set(names)
        for address, version in addresses:
            assert version == (BOKEH_VERSION if "/bokeh/" in address else assets())
            kept = await service.http.get(f"{address}?v={version}")
            assert kept.status_code == 200
            assert "immutable" in kept.headers["cache-control"], address
        for other in ("", "?v=", "?v=0.0.0", f"?w={assets()}"):
            changing = await service.http.get(f"/static/plan.js{other}")
            assert "immutable" not in changing.headers.get("cache-control", ""), other
        missing = await service.http.get(f"/static/nothing.js?v={assets()}")
        assert missing.status_code == 404
        assert "immutable" not in missing.headers.get("cache-control", "")


async def test_scripts_travel_packed_to_those_who_take_it(serving: Serving) -> None:
    async with serving("immediate") as service:
        address = f"/static/bokeh/js/bokeh.min.js?v={BOKEH_VERSION}"
        plain = await service.http.get(address, headers={"Accept-Encoding": "identity"})
        for asked in ("gzip", "br, GZIP;q=0.5", "gzip"):
            packed = await service.http.get(address, headers={"Accept-Encoding": asked})
            assert packed.content == plain.content
            assert packed.headers["content-encoding"] == "gzip"
            assert 3 * int(packed.headers["content-length"]) < len(plain.content)
            assert packed.headers["vary"] == "Accept-Encoding"
            assert packed.headers["content-type"] == plain.headers["content-type"]
        for refused in ("", "identity", "gzip;q=0", "xgzip"):
            found = await service.http.get(address, headers={"Accept-Encoding": refused})
            assert "content-encoding" not in found.headers
            assert found.content == plain.content
        for known in (packed.headers["etag"], plain.headers["etag"]):
            again = await service.http.get(address, headers={"If-None-Match": known})
            assert (again.status_code, again.content) == (304, b"")
        part = await service.http.get(address, headers={"Range": "bytes=2-5"})
        assert (part.status_code, part.content) == (206, plain.content[2:6])
        head = await service.http.head(address)
        assert (head.status_code, head.content) == (200, b"")
        changing = await service.http.get("/static/plan.js")
        assert "content-encoding" not in changing.headers


async def test_every_address_is_under_the_prefix_of_a_proxy(serving: Serving) -> None:
    async with serving("immediate") as service:
        plan_id = await import_plan(service)
        transport = httpx.ASGITransport(service.app, root_path="/planner")
        async with httpx.AsyncClient(transport=transport, base_url="http://zbv") as behind:
            page = await behind.get(f"/planner/plans/{plan_id}")
    addresses = re.findall(r'(?:src|href|action|data-actions|data-chart|data-bokeh)="(/[^"]*)"', page.text)
    assert len(addresses) > 20
    assert [address for address in addresses if not address.startswith("/planner/")] == []


def test_who_may_not_search_is_not_invited_to() -> None:
    view = report.plan_view(baseline_plan("1f1b", parse_problem(PROBLEM)))
    for scopes, is_invited in ((frozenset(), True), (frozenset({"read"}), False), ({"read", "search"}, True)):
        text = plan_page(view, Shell(may=frozenset(scopes)))
        assert ("Change and search again" in text) == is_invited
        assert f"/plans/{view.plan_id}/compare" in text
