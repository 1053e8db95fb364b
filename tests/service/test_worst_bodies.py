"""The worst requests that we know of, each sent once: an orderly answer, and a service that goes on."""

from __future__ import annotations

import pytest
from support.runs_over_http import import_plan
from support.serving import Serving
from zbv_service.bench.malformed import ID
from zbv_service.bench.worst_bodies import Sizes, Worst, worst

pytestmark = pytest.mark.anyio

SMALL = Sizes(body=90_000, plan=180_000, trace=180_000)
TRACE = f"/v1/agents/{ID}/runs/{ID}/generations/0/ranks/0/trace"
ORDERLY = {200, 201, 202, 204, 303, 400, 404, 409, 410, 413, 415, 422, 503}


@pytest.mark.parametrize("method", ["GET", "POST", "PUT"])
async def test_every_one_has_an_orderly_answer(serving: Serving, method: str) -> None:
    async with serving("immediate", max_searches_per_token=10_000) as service:
        plan_id = await import_plan(service)
        for request in worst(plan_id, TRACE, SMALL):
            if request.method != method:
                continue
            headers = {"Content-Type": request.media_type}
            if request.encoding:
                headers["Content-Encoding"] = request.encoding
            body = None if request.make is None else request.make()
            answer = await service.http.request(method, request.path, content=body, headers=headers)
            assert answer.status_code in ORDERLY, (request.name, request.path, answer.text[:500])
            if answer.status_code >= 400 and request.path.startswith("/v1/"):
                assert answer.headers["content-type"] == "application/problem+json", request
                assert len(answer.content) < 64 * 1024, request
            if answer.status_code == 503:
                assert int(answer.headers["retry-after"]) > 0
        assert (await service.http.get("/healthz")).status_code == 200


def test_every_address_that_takes_a_body_has_one() -> None:
    found = list(worst("0" * 64, TRACE))
    named = {(request.method, request.path.replace(ID, "…").partition("?")[0]) for request in found}
    assert {
        ("POST", "/v1/searches"),
        ("POST", "/v1/problems/check"),
        ("POST", "/v1/problems/estimate"),
        ("POST", "/v1/compare"),
        ("POST", "/v1/plans"),
        ("POST", "/v1/runs"),
        ("POST", "/v1/agents"),
        ("POST", "/v1/agents/…/heartbeat"),
        ("POST", "/v1/agents/…/ended"),
    } <= named


@pytest.mark.parametrize("size", [90_000])
def test_bodies_stay_within_the_limits_of_size(size: int) -> None:
    limits = {"/v1/plans": SMALL.plan}
    for request in worst("0" * 64, TRACE, SMALL):
        if request.make is not None and request.method == "POST":
            fixed = request.name in FIXED or request.name.removeprefix("run of ") in FIXED
            assert fixed or len(request.make()) <= limits.get(request.path, size), request


FIXED = {
    "groups of names",
    "layers at their limits",
    "65,536 stages written out",
    "arguments of a run",
    "devices",
    "failures",
}
"""As large as their limits of number make them, whatever the limits of size are."""
_ = Worst
