"""Every error is a problem document (RFC 9457), and a wrong request stores nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.serving import MODEL, PROBLEM, Service, Serving
from zbv_service.documents.parsing import parse_json
from zbv_service.documents.problems import parse_request
from zbv_service.errors import INVALID_BODY, ApiError, error_document, error_response
from zbv_service.settings import Settings
from zbv_solver.errors import InvalidInput

JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Wrong:
    """A wrong request and its expected error."""

    method: str
    path: str
    status: int
    kind: str
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    pointer: str | None = None


def wrong_body(
    change: dict[str, Any] | None = None, pointer: str = "", options: Any = None, path: str = "/v1/searches"
) -> Wrong:
    body = {"problem": {**PROBLEM, **(change or {})}, **({} if options is None else {"options": options})}
    return Wrong("POST", path, 422, "invalid-body", json.dumps(body).encode(), JSON, pointer)


def sent(body: bytes, status: int, kind: str, headers: dict[str, str] = JSON) -> Wrong:
    return Wrong("POST", "/v1/searches", status, kind, body, headers)


COSTS, MEMORY = PROBLEM["costs"], PROBLEM["memory"]

JSON_OF_PRESETS = json.dumps(
    {
        "model": {"presets": ["llama-3.1-8b"] * 9},
        "cluster": {"nodes": 1, "gpus_per_node": 8, "device": "h100"},
        "global_batch": 8,
    }
).encode()

WRONG = {
    "unknown route": Wrong("GET", "/v2/nothing", 404, "not-found"),
    "unknown search": Wrong("GET", "/v1/searches/nothing", 404, "not-found"),
    "unknown plan": Wrong("GET", "/v1/plans/nothing", 404, "not-found"),
    "export of an unknown plan": Wrong("GET", "/v1/plans/nothing/export/svg", 404, "not-found"),
    "unknown format": Wrong("GET", "/v1/plans/nothing/export/none", 404, "not-found"),
    "wrong method": Wrong("DELETE", "/v1/searches", 405, "method-not-allowed"),
    "list limit": Wrong("GET", "/v1/searches?limit=0", 422, "invalid-parameter"),
    "no body": sent(b"", 400, "malformed-json"),
    "no content type": sent(b"{}", 415, "unsupported-media-type", {}),
    "broken JSON": sent(b'{"problem": ', 400, "malformed-json"),
    "NaN": sent(b'{"problem": NaN}', 400, "malformed-json"),
    "not UTF-8": sent(b'{"problem": "\xff"}', 400, "malformed-json"),
    "nested too deeply": sent(b"[" * 40_000, 400, "malformed-json"),
    "nested beyond what pydantic writes": Wrong(
        "POST",
        "/v1/layouts",
        400,
        "malformed-json",
        b'{"model": {"model_type": "llama", "x": ' + b"[" * 260 + b"]" * 260 + b"}}",
        JSON,
    ),
    "NUL in a text": wrong_body({"units": {"time": "a\0b"}}, "/problem/units/time"),
    "NUL in an ignored key": Wrong(
        "POST", "/v1/layouts", 422, "invalid-body", b'{"model": {"x": {"\\u0000": 1}}}', JSON, "/model/x"
    ),
    "NUL in an address": Wrong("GET", "/v1/runs/%00", 404, "not-found"),
    "NUL in an address to post to": Wrong("POST", "/v1/agents/%00/drain", 404, "not-found"),
    "a preset named often": Wrong(
        "POST", "/v1/layouts", 422, "invalid-body", JSON_OF_PRESETS, JSON, "/model/presets"
    ),
    "more tokens than any memory": Wrong(
        "POST",
        "/v1/problems/pack",
        422,
        "invalid-body",
        b'{"batch": {"sequences": [1], "problem": {}, "max_tokens": ' + b"9" * 4000 + b"}}",
        JSON,
        "/batch/max_tokens",
    ),
    "endless integer": sent(b'{"problem": ' + b"9" * 5000 + b"}", 400, "malformed-json"),
    "large body": sent(b" " * 100_001, 413, "body-too-large"),
    "not an object": Wrong("POST", "/v1/searches", 422, "invalid-body", b"[]", JSON, ""),
    "no problem": Wrong("POST", "/v1/searches", 422, "invalid-body", b"{}", JSON, "/problem"),
    "half a surrogate": Wrong(
        "POST", "/v1/searches", 422, "invalid-body", b'{"problem": "\\ud800", "\\udfff": 1}', JSON, "/problem"
    ),
    "unknown key": Wrong("POST", "/v1/searches", 422, "invalid-body", b'{"x": 1}', JSON, "/x"),
    "negative cost": wrong_body({"costs": {**COSTS, "forward": -1}}, "/problem/costs/forward"),
    "number too large": wrong_body({"costs": {**COSTS, "forward": 10**400}}, "/problem/costs/forward"),
    "wrong length": wrong_body({"costs": {**COSTS, "forward": [1, 2, 3]}}, "/problem/costs/forward"),
    "one of a list": wrong_body({"costs": {**COSTS, "forward": [1, 2, -3, 4]}}, "/problem/costs/forward/2"),
    "unknown cost": wrong_body({"costs": {**COSTS, "sideways": 1}}, "/problem/costs/sideways"),
    "leaking deltas": wrong_body({"memory": {**MEMORY, "forward": 2}}, "/problem/memory"),
    "absurdly many microbatches": wrong_body({"microbatches": 10**30}, "/problem/microbatches"),
    "too many for the planner": wrong_body(
        {"pp_degree": 1000, "microbatches": 10**5}, "/problem/microbatches"
    ),
    "too many for this service": wrong_body({"pp_degree": 8, "microbatches": 5000}, "/problem/microbatches"),
    "negative time limit": wrong_body(pointer="/options/time_limit", options={"time_limit": -1}),
    "endless time limit": wrong_body(pointer="/options/time_limit", options={"time_limit": 1e9}),
    "plan without ranks": Wrong("POST", "/v1/plans", 422, "invalid-body", b'{"problem": {}}', JSON, "/ranks"),
    "large plan": Wrong("POST", "/v1/plans", 413, "body-too-large", b" " * 200_001, JSON),
}


async def refused(service: Service, wrong: Wrong) -> httpx.Response:
    return await service.http.request(wrong.method, wrong.path, content=wrong.body, headers=wrong.headers)


async def test_every_error_is_a_problem_document_and_stores_nothing(service: Service) -> None:
    for name, wrong in WRONG.items():
        answer = await refused(service, wrong)
        assert answer.headers["content-type"] == "application/problem+json", name
        body = answer.json()
        assert (answer.status_code, body["status"]) == (wrong.status, wrong.status), (name, body)
        assert body["type"] == f"/errors/{wrong.kind}", (name, body)
        assert set(body) <= {"type", "title", "status", "detail", "errors", "request_id"}, name
        assert body["title"], name
        assert len(body["detail"]) > 10, name
        for entry in body.get("errors", []):
            assert set(entry) in ({"pointer", "detail"}, {"parameter", "detail"}), name
        if wrong.pointer is not None:
            assert wrong.pointer in [entry["pointer"] for entry in body["errors"]], (name, body)
    assert await service.listed("searches") == []


async def test_every_broken_rule_of_a_body_is_reported(service: Service) -> None:
    problem = {**PROBLEM, "pp_degree": 0, "costs": {"forward": "x"}, "colour": "red"}
    errors = (await service.submit(problem, effort="heroic")).json()["errors"]
    names = ("pp_degree", "costs/forward", "costs/backward_input", "costs/backward_weight", "colour")
    expected = {*(f"/problem/{name}" for name in names), "/options/effort"}
    assert {entry["pointer"] for entry in errors} == expected


async def test_types_are_addresses_below_the_root_path(serving: Serving) -> None:
    async with serving("broken") as service:
        failed = await service.done()
        run = {"problem": PROBLEM, "model": MODEL, "nodes": 2, "steps": 5}
        run_id = (await service.http.post("/v1/runs", json=run)).json()["id"]
        await service.until_run(run_id, lambda found: found["state"] == "failed")
        transport = httpx.ASGITransport(service.app, root_path="/planner")
        async with httpx.AsyncClient(transport=transport, base_url="http://zbv") as http:
            search = f"/planner/v1/searches/{failed['id']}"
            missing = (await http.get("/planner/v1/searches/x")).json()
            listed = (await http.get("/planner/v1/searches")).json()["searches"]
            events = (await http.get(f"{search}/events?after=0")).json()["events"]
            runs = (await http.get("/planner/v1/runs")).json()["runs"]
            errors = [(await http.get(search)).json()["error"], listed[-1]["error"], events[-1]["error"]]
            for error in (missing, *errors, runs[0]["error"]):
                assert error["type"].startswith("/planner/errors/"), error
                assert (await http.get(error["type"])).status_code == 200
            page = await http.get("/planner/v1/searches/x/problem", headers={"accept": "text/html"})
            assert 'href="/planner/errors/not-found"' in page.text
    assert failed["error"]["type"].startswith("/errors/"), "without a root path"


async def test_a_body_without_a_declared_length_is_limited(serving: Serving) -> None:
    async def endless() -> Any:
        for _ in range(10_000):
            yield b" " * 1000

    async with serving("immediate") as service:
        answer = await service.http.post("/v1/searches", content=endless(), headers=JSON)
        assert (answer.status_code, answer.json()["type"]) == (413, "/errors/body-too-large")


_NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
_TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
_JSON_VALUES = st.recursive(
    st.none() | st.booleans() | _NUMBERS | _TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=8,
)


@given(_JSON_VALUES)
def test_strict_parsing_accepts_valid_json(value: Any) -> None:
    assert parse_json(json.dumps(value).encode()) == value


@given(st.binary(max_size=40))
def test_strict_parsing_accepts_or_refuses_any_bytes(body: bytes) -> None:
    status = 400
    try:
        json.dumps(parse_json(body), allow_nan=False)
    except ApiError as error:
        status = error.kind.status
    except InvalidInput:
        return
    assert status == 400


_ODD_VALUES = [None, True, 0, -1, 1.5, 10**30, "", "v", "\ud800", [], [1, "x"], {}, {"\ud800": 1}]
_KEYS = ["problem", "options", "costs", "memory", "units", "pp_degree", "objective", "placement"]


@pytest.mark.parametrize("key", _KEYS)
@pytest.mark.parametrize("value", _ODD_VALUES, ids=repr)
def test_any_value_at_any_key_is_accepted_or_refused(key: str, value: Any) -> None:
    body: dict[str, Any] = {"problem": dict(PROBLEM), "options": {}}
    (body if key in body else body["problem"])[key] = value
    try:
        parse_request(body, Settings())
    except InvalidInput as error:
        answered = error_response(error_document(INVALID_BODY, str(error)))
    else:
        return
    json.loads(bytes(answered.body))
