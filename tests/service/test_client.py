"""The thin client: errors that tell cases apart, and bounded repetition."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from zbv_service import client as client_module
from zbv_service.client import (
    Client,
    ClientError,
    InvalidAnswer,
    InvalidRequest,
    NotFound,
    SearchEnded,
    SearchTimeout,
    ServiceFailed,
    ServiceUnreachable,
)

SEARCH: dict[str, Any] = {
    "id": "a",
    "state": "queued",
    "objective": None,
    "lower_bound": None,
    "gap": None,
    "plan_id": None,
    "error": None,
    "method": None,
    "attempts": 0,
    "options": {},
    "created_at": "2026-01-02T03:04:05Z",
}


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "BACK_OFF_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(client_module, "POLL_SECONDS", (0.0, 0.0))


def answering(*answers: httpx.Response | Exception) -> tuple[Client, list[httpx.Request]]:
    """A client whose requests get these answers, and the requests it made."""
    left: Iterator[httpx.Response | Exception] = iter(answers)
    requests: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        given = next(left)
        if isinstance(given, Exception):
            raise given
        return given

    return Client("http://zbv", transport=httpx.MockTransport(answer), retries=2), requests


def problem(status: int, **more: Any) -> httpx.Response:
    return httpx.Response(status, json={"type": "t", "title": "T", "status": status, "detail": "D", **more})


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (problem(404), NotFound),
        (problem(422), InvalidRequest),
        (problem(500), ServiceFailed),
        (httpx.Response(404, text="nginx"), InvalidAnswer),
        (httpx.Response(200, text="<html>"), InvalidAnswer),
        (httpx.Response(200, json=[1]), InvalidAnswer),
        (httpx.Response(200, json={"id": "a"}), InvalidAnswer),
    ],
)
def test_each_wrong_answer_is_its_own_error(answer: httpx.Response, kind: type[ClientError]) -> None:
    client, requests = answering(answer)
    with pytest.raises(kind):
        client.search("a")
    assert len(requests) == 1


def test_broken_rules_come_with_their_pointers() -> None:
    client, _ = answering(problem(422, errors=[{"pointer": "/problem/costs", "detail": "wrong"}]))
    with pytest.raises(InvalidRequest) as caught:
        client.submit({})
    assert [str(issue) for issue in caught.value.issues] == ["/problem/costs: wrong"]


@pytest.mark.parametrize("trouble", [httpx.ConnectError("refused"), httpx.ReadTimeout("slow"), problem(503)])
def test_passing_trouble_is_tried_again(trouble: httpx.Response | Exception) -> None:
    client, requests = answering(trouble, trouble, httpx.Response(200, json=SEARCH))
    assert client.search("a").state == "queued"
    assert len(requests) == 3


def test_lasting_trouble_is_reported_in_the_end() -> None:
    client, requests = answering(*[httpx.ConnectError("refused")] * 3)
    with pytest.raises(ServiceUnreachable, match="refused"):
        client.search("a")
    assert len(requests) == 3
    client, _ = answering(*[problem(503)] * 3)
    with pytest.raises(ServiceFailed):
        client.search("a")


def test_an_address_that_is_none_is_not_tried_twice() -> None:
    with pytest.raises(ServiceUnreachable, match="http://127"):
        Client("nonsense").search("a")


def states(*changes: dict[str, Any]) -> tuple[Client, list[httpx.Request]]:
    return answering(*(httpx.Response(200, json={**SEARCH, **change}) for change in changes))


def test_waiting_shows_every_state_and_ends_with_the_plan() -> None:
    client, _ = states({}, {"state": "running"}, {"state": "done", "plan_id": "p"})
    seen: list[str] = []
    assert client.wait("a", lambda found: seen.append(found.state)).plan_id == "p"
    assert seen == ["queued", "running", "done"]


def test_a_search_that_ends_without_a_plan_is_an_error_with_the_reason() -> None:
    client, _ = states({"state": "infeasible", "error": {"detail": "too tight"}})
    with pytest.raises(SearchEnded, match="too tight") as caught:
        client.wait("a")
    assert caught.value.search.state == "infeasible"


def test_a_cancelled_search_with_a_plan_is_an_answer() -> None:
    client, _ = states({"state": "cancelled", "plan_id": "p"})
    assert client.wait("a").state == "cancelled"


def test_waiting_ends_when_the_caller_says() -> None:
    client, _ = states({"state": "running"})
    with pytest.raises(SearchTimeout, match="running"):
        client.wait("a", timeout=0.0)


_RANK: dict[str, Any] = {
    "plan_id": "p",
    "rank": 0,
    "pp_degree": 2,
    "microbatches": 1,
    "placement": "v",
    "chunks": 2,
    "stages": [0, 3],
    "actions": ["0F0"],
    "peers": [1],
    "channels": [],
}


@pytest.mark.parametrize(
    "change",
    [
        {"actions": ["0X0"]},
        {"channels": [{"peer": 1, "direction": "send", "kind": "rumour", "transfers": []}]},
        {"channels": [{"peer": 1, "direction": "send", "kind": "gradient", "transfers": ["x"]}]},
        {"channels": [{"peer": 1}]},
    ],
)
def test_a_rank_that_cannot_be_read_is_refused(change: dict[str, Any]) -> None:
    client, _ = answering(httpx.Response(200, json={**_RANK, **change}))
    with pytest.raises(InvalidAnswer):
        client.rank("p", 0)


def test_a_plan_that_is_not_the_one_asked_for_is_refused() -> None:
    client, _ = answering(httpx.Response(200, json={"problem": {}, "ranks": []}))
    with pytest.raises(InvalidAnswer):
        client.plan("p")
