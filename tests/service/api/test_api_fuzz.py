"""Malformed bodies get problem documents."""

from __future__ import annotations

import json
import sys
from random import Random
from typing import Any

import pytest
from support.malformed import ID, ROUTES, RUN_ID, malformed, prepare, send
from support.paths import ROOT
from support.serving import Serving

OPENAPI = json.loads((ROOT / "service" / "openapi.json").read_text())


def test_every_route_with_a_body_is_a_target() -> None:
    documented = {
        (method.upper(), path)
        for path, methods in OPENAPI["paths"].items()
        for method, operation in methods.items()
        if "requestBody" in operation
    }
    names = {"{agent_id}": ID, "{run_id}": RUN_ID, "{generation}": "0", "{rank}": "0"}

    def filled(path: str) -> str:
        for name, value in names.items():
            path = path.replace(name, value)
        return path

    assert {(route.method, route.path) for route in ROUTES} == {
        (method, filled(path)) for method, path in documented
    }


def test_a_seed_determines_the_bodies() -> None:
    once, again, other = ([malformed(random) for _ in range(50)] for random in map(Random, (1, 1, 2)))
    assert once == again != other
    assert len({made.content for made in once}) > 40


@pytest.mark.parametrize("limit", [2_000, 5_000])
def test_the_bodies_do_not_depend_on_the_recursion_limit(limit: int) -> None:
    before = sys.getrecursionlimit()
    usual, again = Random(1), Random(1)
    expected = [malformed(usual) for _ in range(300)]
    sys.setrecursionlimit(limit)
    try:
        found = [malformed(again) for _ in range(300)]
    finally:
        sys.setrecursionlimit(before)
    assert found == expected


async def test_no_malformed_body_causes_a_server_error(serving: Serving) -> None:
    statuses: dict[int, int] = {}
    async with serving("immediate", agent_timeout_seconds=3600.0, max_trace_bytes=2**20) as service:
        run_id, random = await prepare(service.http), Random(1)
        for request in (malformed(random) for _ in range(250)):
            status, text = await send(service.http, request, run_id)
            assert status < 500, (request, text)
            if status >= 400:
                body: dict[str, Any] = json.loads(text)
                assert body["type"].startswith("/errors/"), (request, text)
            statuses[status] = statuses.get(status, 0) + 1
        assert (await service.http.get("/readyz")).status_code == 200
    # The bodies were refused for many reasons, also after they were parsed.
    assert {400, 413, 415, 422} <= set(statuses)
    assert statuses[422] > 30
