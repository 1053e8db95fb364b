"""The worst known bodies, each sent once: they get a regular response, and the service continues."""

from __future__ import annotations

from support.malformed import ID
from support.serving import Serving
from support.worst_bodies import Sizes, worst

SMALL = Sizes(body=90_000, plan=180_000, trace=180_000)
TRACE = f"/v1/agents/{ID}/runs/{ID}/generations/0/ranks/0/trace"
FIXED = {
    "groups of names",
    "layers at their limits",
    "65,536 stages written out",
    "arguments of a run",
    "devices",
    "failures",
}
"""Their size depends on limits of counts, not on limits of bytes."""
REGULAR = {200, 201, 202, 204, 303, 400, 404, 409, 410, 413, 415, 422, 503}


async def test_every_worst_body_gets_a_regular_response(serving: Serving) -> None:
    async with serving("immediate", max_searches_per_token=10_000) as service:
        plan_id = await service.import_plan()
        for request in worst(plan_id, TRACE, SMALL):
            if request.make is None:
                continue
            headers = {"Content-Type": request.media_type}
            if request.encoding:
                headers["Content-Encoding"] = request.encoding
            answer = await service.http.request(
                request.method, request.path, content=request.make(), headers=headers
            )
            assert answer.status_code in REGULAR, (request.name, request.path, answer.text[:500])
            if answer.status_code >= 400 and request.path.startswith("/v1/"):
                assert answer.headers["content-type"] == "application/problem+json", request
                assert len(answer.content) < 64 * 1024, request
            if answer.status_code == 503:
                assert int(answer.headers["retry-after"]) > 0
        assert (await service.http.get("/healthz")).status_code == 200


def test_every_route_with_a_body_has_a_worst_body() -> None:
    found = list(worst("0" * 64, TRACE))
    named = {(request.method, request.path.replace(ID, "…").partition("?")[0]) for request in found}
    assert {
        ("POST", "/v1/searches"),
        ("POST", "/v1/problems/check"),
        ("POST", "/v1/problems/estimate"),
        ("POST", "/v1/problems/compare"),
        ("POST", "/v1/problems/pack"),
        ("POST", "/v1/layouts"),
        ("POST", "/v1/plans"),
        ("POST", "/v1/runs"),
        ("POST", "/v1/agents"),
        ("POST", "/v1/agents/…/heartbeat"),
        ("POST", "/v1/agents/…/ended"),
    } <= named


def test_worst_bodies_respect_the_size_limits() -> None:
    limits = {"/v1/plans": SMALL.plan}
    for request in worst("0" * 64, TRACE, SMALL):
        if request.make is not None and request.method == "POST":
            is_fixed = request.name.removeprefix("run of ") in FIXED
            assert is_fixed or len(request.make()) <= limits.get(request.path, SMALL.body), request
