"""Log lines: readable by machines, with the ids of requests and searches, and without secrets."""

from __future__ import annotations

import contextvars
import io
import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
from support.serving import Service, Serving
from zbv_service.observability import logs
from zbv_service.observability.context import REQUEST_ID, SEARCH_ID
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
    assert (line["message"], line["route"], line["status"]) == (
        "GET /v1/searches/x 404",
        "/v1/searches/{search_id}",
        404,
    )
    assert line["milliseconds"] >= 0


async def test_an_unsafe_request_id_is_replaced(service: Service) -> None:
    unsafe = ("", "x" * 129, "two words", 'a"b', "<script>", "a,b", "\u00e9")
    for given, wanted in (
        *((text, "[0-9a-f]{32}") for text in unsafe),
        ("A-z0.9:_/+=" + "x" * 100, "A-z0.*"),
    ):
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


async def test_reads_are_logged_only_when_they_fail(serving: Serving, log: io.StringIO) -> None:
    logging.getLogger().setLevel("INFO")
    async with serving("immediate") as service:
        await service.http.get("/v1/searches")
        await service.http.get("/v1/searches/x")
        await service.submit()
    said = [line["message"] for line in lines(log) if line["logger"].endswith("requests")]
    assert said[:2] == ["GET /v1/searches/x 404", "POST /v1/searches 202"]


async def test_no_secret_is_logged(serving: Serving, log: io.StringIO) -> None:
    headers = {"Authorization": "Bearer sesame-one"}
    async with serving("immediate") as service:
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
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", line["time"])


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
