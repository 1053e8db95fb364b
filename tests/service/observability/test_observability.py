"""Log lines, readable by machines and without secrets, and the metrics of docs/metrics.md."""

from __future__ import annotations

import asyncio
import contextvars
import io
import json
import logging
import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse
from support.paths import ROOT
from support.serving import PROBLEM, Service, Serving, until
from zbv_service.observability import logs
from zbv_service.observability.context import REQUEST_ID, SEARCH_ID
from zbv_service.observability.metrics import Metrics
from zbv_service.searches.runner import family
from zbv_service.security.tokens import TokenText


@pytest.fixture
def log(request: pytest.FixtureRequest) -> Iterator[io.StringIO]:
    """The JSON log lines of a test; the previous configuration is restored."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers = []
    stream = io.StringIO()
    logs.configure("debug", "json", stream)
    yield stream
    root.handlers, root.level = handlers, level


def lines(log: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.getvalue().splitlines()]


async def test_a_request_has_one_id_everywhere(serving: Serving, log: io.StringIO) -> None:
    async with serving("broken") as service:
        answer = await service.http.get("/v1/searches/x", headers={"X-Request-ID": "mine-1"})
        assert answer.headers["x-request-id"] == answer.json()["request_id"] == "mine-1"
        made = [(await service.http.get("/healthz")).headers["x-request-id"] for _ in range(2)]
        assert made[0] != made[1]
    (line,) = [line for line in lines(log) if line.get("request_id") == "mine-1"]
    assert (line["message"], line["status"]) == ("GET /v1/searches/x 404", 404)
    assert line["route"] == "/v1/searches/{search_id}"
    assert line["milliseconds"] >= 0


async def test_an_unsafe_request_id_is_replaced(service: Service) -> None:
    unsafe = ("", "x" * 129, "two words", 'a"b', "<script>", "a,b", "\u00e9")
    safe = ("A-z0.9:_/+=" + "x" * 100, "A-z0.*")
    for given, wanted in (*((text, "[0-9a-f]{32}") for text in unsafe), safe):
        answer = await service.http.get("/healthz", headers=[(b"x-request-id", given.encode())])
        assert re.fullmatch(wanted, answer.headers["x-request-id"]), given


async def test_lines_about_a_search_name_it(serving: Serving, log: io.StringIO) -> None:
    async with serving("broken") as service:
        answer = await service.submit()
        search_id, request_id = answer.json()["id"], answer.headers["x-request-id"]
        await service.ended(search_id)
    (queued,) = [line for line in lines(log) if line["message"] == f"search {search_id} is queued"]
    assert queued["request_id"] == request_id
    about = [line for line in lines(log) if line.get("search_id") == search_id]
    assert any("starts" in line["message"] for line in about)
    assert any("ZeroDivisionError" in line.get("exception", "") for line in about)


async def test_reads_are_logged_only_when_they_fail(service: Service, log: io.StringIO) -> None:
    logging.getLogger().setLevel("INFO")
    await service.http.get("/v1/searches")
    await service.http.get("/v1/searches/x")
    await service.submit()
    said = [line["message"] for line in lines(log) if line["logger"].endswith("requests")]
    assert said[:2] == ["GET /v1/searches/x 404", "POST /v1/searches 202"]


async def test_no_secret_is_logged(service: Service, log: io.StringIO) -> None:
    headers = {"Authorization": "Bearer sesame-one"}
    await service.http.get("/v1/searches?token=sesame-two", headers=headers)
    await service.http.get("/nothing?token=sesame-two", headers=headers)
    try:
        raise ValueError("GET /x?a=1&token=sesame-three&b=2 with Authorization: sesame-four")
    except ValueError:
        logging.getLogger("x").exception("asked http://h/?token=sesame-five and bearer sesame-six")
    token = TokenText.new()
    logging.getLogger("x").warning("found %s in %r", token, {"where": [str(token)]})
    text = log.getvalue()
    assert token.secret not in text
    assert f"zbv_{token.id}_[redacted]" in text, "the id of a token may be logged"
    assert "sesame" not in text
    assert "[redacted]&b=2" in text


def test_every_record_is_one_line_with_a_json_object() -> None:
    record = logging.makeLogRecord(
        {"name": "x", "levelname": "WARNING", "msg": "two\nlines \u2028 \ud800", "size": 3, "what": object()}
    )
    text = logs.JsonLines().format(record)
    assert text.isascii()
    assert "\n" not in text
    line = json.loads(text)
    assert (line["level"], line["logger"], line["size"]) == ("warning", "x", 3)
    assert line["message"].startswith("two\nlines")
    assert datetime.fromisoformat(line["time"]).utcoffset() == timedelta(0)


def test_no_message_forges_a_line_of_text() -> None:
    message = "one\n2026 error x: two\x1b[2J\r\u2028\x9b"
    record = logging.makeLogRecord({"name": "x", "levelname": "INFO", "msg": message})
    values = contextvars.copy_context()
    values.run(SEARCH_ID.set, "s")
    values.run(REQUEST_ID.set, "r")
    text = values.run(logs.TextLines().format, record)
    assert text.endswith(r"info x: one\n2026 error x: two\x1b[2J\r\u2028\x9b [request=r search=s]")
    assert text.isprintable()


def test_auto_is_text_on_a_terminal_and_json_elsewhere(log: io.StringIO) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, wanted, is_json in (
        (Terminal(), "auto", False),
        (io.StringIO(), "auto", True),
        (Terminal(), "json", True),
    ):
        logging.getLogger().handlers = []
        logs.configure("info", wanted, stream)  # type: ignore[arg-type]  # the literals above
        logging.getLogger("x").info("said")
        assert stream.getvalue().startswith("{") == is_json


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


async def test_a_search_shows_in_the_metrics(service: Service) -> None:
    before = await scraped(service)
    search_id = (await service.submit()).json()["id"]
    plan_id = (await service.ended(search_id))["plan_id"]
    for path in (f"/v1/plans/{plan_id}", *[f"/v1/plans/{plan_id}/ranks/0"] * 3, "/nonsense", "/v1/runs/x"):
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


async def test_agents_runs_queued_searches_and_open_event_streams_are_counted(serving: Serving) -> None:
    async with serving("held", searches=1) as service:
        search_id = await service.begun()
        await service.register("a")
        await service.submit_run(plan_id=None, problem=PROBLEM, nodes=1, search_options={"seed": 1})
        address, accept = f"/v1/searches/{search_id}/events", {"Accept": "text/event-stream"}
        stream = asyncio.create_task(service.http.get(address, headers=accept))
        await until(lambda: service.app.state.application.events.readers == 1, "it follows")
        samples = await scraped(service)
        for kind, state, count in (("agents", "live", 1), ("agents", "lost", 0), ("runs", "planning", 1)):
            assert value(samples, f"zbv_{kind}", state=state) == count
        assert value(samples, "zbv_event_streams") == 1
        assert value(samples, "zbv_searches", state="running") == 1
        assert value(samples, "zbv_searches", state="queued") == 1
        assert value(samples, "zbv_search_queue_age_seconds") > 0
        await service.cancel(search_id)
        await stream
        assert value(await scraped(service), "zbv_event_streams") == 0


def test_the_label_of_a_method_is_its_first_word() -> None:
    labels = {"greedy": "greedy", "import: gpipe 3": "import", "CP-SAT+x": "cp-sat", None: "none", "": "none"}
    assert {method: family(method) for method in labels} == labels
