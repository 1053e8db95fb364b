"""Both clients: requests, results and typed errors."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from support.client_answers import SEARCH, Answering, found, problem
from zbv_service.client import (
    Client,
    ClientError,
    InvalidAnswer,
    InvalidRequest,
    NotFound,
    ServiceFailed,
    ServiceUnreachable,
)


@pytest.mark.parametrize(
    ("status", "kind"), [(404, NotFound), (409, InvalidRequest), (422, InvalidRequest), (500, ServiceFailed)]
)
def test_each_problem_is_its_own_error(answering: Answering, status: int, kind: type[ClientError]) -> None:
    client, requests = answering(problem(status, request_id="r"))
    with pytest.raises(kind) as caught:
        client.search("a")
    assert type(caught.value) is kind
    assert (caught.value.status, caught.value.request_id) == (status, "r")  # type: ignore[attr-defined]
    assert len(requests) == 1


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(404, text="nginx"),
        httpx.Response(200, text="<html>"),
        httpx.Response(200, json=[1]),
        httpx.Response(200, json={"id": "a"}),
        httpx.Response(200, json={**SEARCH, "created_at": "yesterday"}),
        httpx.Response(304),
    ],
)
def test_an_answer_that_breaks_the_api_is_an_invalid_answer(
    answering: Answering, answer: httpx.Response
) -> None:
    client, requests = answering(answer)
    with pytest.raises(InvalidAnswer):
        client.search("a")
    assert len(requests) == 1


def test_an_invalid_request_lists_the_broken_rules_with_pointers(answering: Answering) -> None:
    client, _ = answering(problem(422, errors=[{"pointer": "/problem/costs", "detail": "wrong"}]))
    with pytest.raises(InvalidRequest) as caught:
        client.submit({})
    assert [str(issue) for issue in caught.value.issues] == ["/problem/costs: wrong"]


@pytest.mark.parametrize(
    "odd",
    [
        {"status": "abc"},
        {"errors": "x"},
        {"errors": [7, {"pointer": None}]},
        {"request_id": 7, "type": None, "title": None},
    ],
)
def test_a_problem_document_with_odd_members_is_an_ordinary_error(
    answering: Answering, odd: dict[str, Any]
) -> None:
    client, _ = answering(httpx.Response(422, json={"detail": "D", **odd}))
    with pytest.raises(InvalidRequest) as caught:
        client.search("a")
    assert caught.value.status == 422
    assert all(isinstance(str(issue), str) for issue in caught.value.issues)


def test_a_token_is_sent_with_every_request(answering: Answering) -> None:
    client, requests = answering(found(), token="secret")
    client.search("a")
    assert requests[0].headers["authorization"] == "Bearer secret"
    client, requests = answering(found())
    client.search("a")
    assert "authorization" not in requests[0].headers


def test_an_id_stays_one_segment_of_the_path(answering: Answering) -> None:
    client, requests = answering(found(), found())
    client.search("../plans/x?y#z")
    client.search("..")
    assert [request.url.raw_path for request in requests] == [
        b"/v1/searches/..%2Fplans%2Fx%3Fy%23z",
        b"/v1/searches/%2E%2E",
    ]


def test_an_invalid_address_is_an_error_with_an_example() -> None:
    with pytest.raises(ServiceUnreachable, match="http://127"):
        Client("nonsense").search("a")


def test_all_searches_reads_every_page(answering: Answering) -> None:
    first = {"searches": [{**SEARCH, "id": "a"}, {**SEARCH, "id": "b"}], "next": "/v1/searches?after=b"}
    last = {"searches": [{**SEARCH, "id": "c"}], "next": None}
    client, requests = answering(httpx.Response(200, json=first), httpx.Response(200, json=last))
    listed = list(client.all_searches(2, state="done"))
    assert [search.id for search in listed] == ["a", "b", "c"]
    assert [request.url.query for request in requests] == [b"limit=2&state=done", b"after=b"]


@pytest.mark.parametrize("following", ["https://evil.example/v1/", "//evil.example", 7, "v1/searches"])
def test_a_link_to_the_next_page_on_another_site_is_refused(answering: Answering, following: Any) -> None:
    """The client would send its token there."""
    client, requests = answering(httpx.Response(200, json={"searches": [], "next": following}))
    with pytest.raises(InvalidAnswer):
        list(client.all_searches())
    assert len(requests) == 1


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
        {"channels": [{"peer": 1, "direction": "both", "transfers": []}]},
        {"channels": [{"peer": 1, "direction": "send", "transfers": ["0:0"]}]},
        {"channels": [{"peer": 1}]},
        {"rank": "zero"},
    ],
)
def test_a_malformed_rank_is_an_invalid_answer(answering: Answering, change: dict[str, Any]) -> None:
    client, _ = answering(httpx.Response(200, json={**_RANK, **change}))
    with pytest.raises(InvalidAnswer):
        client.rank("p", 0)


def test_another_plan_than_requested_is_an_invalid_answer(answering: Answering) -> None:
    client, _ = answering(httpx.Response(200, json={"problem": {}, "ranks": []}))
    with pytest.raises(InvalidAnswer):
        client.plan("p")
