"""Metrics: the names in docs/metrics.md, and their values."""

from __future__ import annotations

import re
import time
from pathlib import Path

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse
from support import fake_searches
from support.fake_kinds import kinds
from support.live import listening
from support.paths import ROOT
from support.serving import DEADLINE, PROBLEM, Service, Serving
from zbv_service.app import create_app
from zbv_service.observability.metrics import Metrics
from zbv_service.searches.runner import family
from zbv_service.settings import Settings

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


def test_names_and_units_follow_the_conventions_of_prometheus() -> None:
    for name, kind in DOCUMENTED.items():
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
        assert name.endswith("_total") == (kind == "counter")
        assert not re.search(r"_(milliseconds|ms|minutes|hours|kib|mib|percent)\b", name)
        assert kind != "histogram" or name.endswith(("_seconds", "_ratio"))


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


async def test_queued_searches_are_counted_with_the_age_of_the_oldest(serving: Serving) -> None:
    async with serving("held", searches=1) as service:
        await service.begun()
        await service.submit(seed=1)
        samples = await scraped(service)
        assert value(samples, "zbv_searches", state="running") == 1
        assert value(samples, "zbv_searches", state="queued") == 1
        assert value(samples, "zbv_search_queue_age_seconds") > 0


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


def test_open_event_streams_are_counted(tmp_path: Path) -> None:
    search = fake_searches.InDirectory(fake_searches.held, tmp_path)
    settings = Settings(auth="none", database=f"sqlite:///{tmp_path}/zbv.db", searches=1)

    def streams(count: int) -> bool:
        return f"zbv_event_streams {count:.1f}" in http.get("/metrics").text

    with (
        listening(create_app(settings, kinds=kinds(search))) as live,
        httpx.Client(base_url=live.address, timeout=DEADLINE) as http,
    ):
        found = http.post("/v1/searches", json={"problem": PROBLEM})
        path, accept = f"{found.headers['location']}/events", {"Accept": "text/event-stream"}
        assert streams(0)
        with http.stream("GET", path, headers=accept) as answer:
            assert answer.status_code == 200
            assert streams(1)
        until = time.monotonic() + DEADLINE
        while not streams(0):  # the service notices the end at its next check
            assert time.monotonic() < until
        (tmp_path / "release").touch()


async def test_a_client_that_accepts_openmetrics_gets_it(serving: Serving) -> None:
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    async with serving("immediate") as service:
        answer = await service.http.get("/metrics", headers=accept)
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    families = parse_openmetrics(answer.text)  # type: ignore[no-untyped-call]  # the library's own
    assert "zbv_searches" in {found.name for found in families}


def test_applications_share_no_metrics() -> None:
    one, other = Metrics(), Metrics()
    one.plan_fetches.inc()
    assert b"zbv_plan_fetches_total 1.0" in _text(one)
    assert b"zbv_plan_fetches_total 0.0" in _text(other)


def _text(metrics: Metrics) -> bytes:
    from prometheus_client import generate_latest

    return generate_latest(metrics.registry)


@pytest.mark.parametrize(
    ("method", "label"),
    [
        ("greedy", "greedy"),
        ("import: gpipe 3", "import"),
        ("CP-SAT+x", "cp-sat"),
        (None, "none"),
        ("  ", "none"),
    ],
)
def test_the_label_of_a_method_is_its_first_word(method: str | None, label: str) -> None:
    assert family(method) == label
