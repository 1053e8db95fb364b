"""Metrics: the names in docs/metrics.md, and their values."""

from __future__ import annotations

import asyncio
import re

from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse
from support.paths import ROOT
from support.serving import PROBLEM, Service, Serving, until
from zbv_service.observability.metrics import Metrics
from zbv_service.searches.runner import family

DOCUMENTED = {
    row[1]: row[2]
    for row in re.finditer(r"^\| `(zbv_\w+)` \| (\w+) \|", (ROOT / "docs" / "metrics.md").read_text(), re.M)
}
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


async def scraped(service: Service) -> Samples:
    answer = await service.http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for found in parse(answer.text)
        for sample in found.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples.get((name, frozenset(labels.items())), 0.0)


def test_exactly_the_documented_metrics_exist() -> None:
    found = {
        metric.name + ("_total" if metric.type == "counter" else ""): metric.type
        for metric in Metrics().registry.collect()
        if metric.name.startswith("zbv_")
    }
    assert found == DOCUMENTED


async def test_a_search_shows_in_the_metrics(serving: Serving) -> None:
    async with serving("immediate") as service:
        before = await scraped(service)
        search_id = (await service.submit()).json()["id"]
        plan_id = (await service.ended(search_id))["plan_id"]
        for path in (
            f"/v1/plans/{plan_id}",
            *[f"/v1/plans/{plan_id}/ranks/0"] * 3,
            "/nonsense",
            "/v1/runs/x",
        ):
            await service.http.get(path)
        await service.http.request("JUNK", "/healthz")
        after = await scraped(service)

    assert value(before, "zbv_searches", state="done") == 0
    assert value(after, "zbv_searches", state="done") == 1
    assert value(after, "zbv_searches", state="queued") == 0
    assert ("zbv_searches", frozenset({("state", "infeasible")})) in after
    assert value(after, "zbv_search_duration_seconds_count", state="done", method="fake") == 1
    assert value(after, "zbv_search_gap_ratio_count") == 1
    assert value(after, "zbv_search_gap_ratio_sum") == 1.0  # the fake plan's gap
    assert value(after, "zbv_plan_fetches_total") == 1
    assert value(after, "zbv_rank_fetches_total") == 3  # the first by the route, the others by RankFetches
    requests = "zbv_http_requests_total"
    assert value(after, requests, method="POST", route="/v1/searches", status="202") == 1
    rank = "/v1/plans/{plan_id}/ranks/{rank}"
    assert value(after, requests, method="GET", route=rank, status="200") == 3
    assert value(after, requests, method="GET", route="/v1/runs/{run_id}", status="404") == 1
    assert value(after, requests, method="GET", route="unknown", status="404") == 1
    assert value(after, requests, method="unknown", route="/healthz", status="405") == 1
    assert value(after, "zbv_http_request_duration_seconds_count", method="GET", route=rank) == 3
    assert value(after, "zbv_event_streams") == 0
    assert value(after, "process_resident_memory_bytes") > 0


async def test_agents_and_runs_are_counted_by_state(serving: Serving) -> None:
    agent = {"id": "a" * 32, "name": "n", "address": "localhost", "port": 1, "slots": 1}
    run = {"problem": PROBLEM, "model": {"factory": "a:b"}, "nodes": 1, "steps": 1}
    async with serving("held", searches=1) as service:
        await service.http.post("/v1/agents", json=agent)
        await service.http.post("/v1/runs", json=run)
        samples = await scraped(service)
    assert value(samples, "zbv_agents", state="live") == 1
    assert value(samples, "zbv_agents", state="lost") == 0
    assert value(samples, "zbv_runs", state="planning") == 1


async def test_queued_searches_and_open_event_streams_are_counted(serving: Serving) -> None:
    async with serving("held", searches=1) as service:
        search_id = await service.begun()
        await service.submit(seed=1)
        address, accept = f"/v1/searches/{search_id}/events", {"Accept": "text/event-stream"}
        stream = asyncio.create_task(service.http.get(address, headers=accept))
        await until(lambda: service.app.state.application.events.readers == 1, "it follows")
        samples = await scraped(service)
        assert value(samples, "zbv_event_streams") == 1
        assert value(samples, "zbv_searches", state="running") == 1
        assert value(samples, "zbv_searches", state="queued") == 1
        assert value(samples, "zbv_search_queue_age_seconds") > 0
        await service.cancel(search_id)
        await stream
        assert value(await scraped(service), "zbv_event_streams") == 0


async def test_a_client_that_accepts_openmetrics_gets_it(service: Service) -> None:
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    answer = await service.http.get("/metrics", headers=accept)
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    families = parse_openmetrics(answer.text)  # type: ignore[no-untyped-call]  # the library's own
    assert "zbv_searches" in {found.name for found in families}


def test_the_label_of_a_method_is_its_first_word() -> None:
    labels = {
        "greedy": "greedy",
        "import: gpipe 3": "import",
        "CP-SAT+x": "cp-sat",
        None: "none",
        "  ": "none",
    }
    assert {method: family(method) for method in labels} == labels
