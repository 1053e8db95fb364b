"""The API conforms to its OpenAPI document for any request: no 5xx, and no undocumented response."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as examples
from schemathesis import Case, CheckContext, Response
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from support.live import live_service
from support.paths import ROOT
from support.serving import DEADLINE, PLAN
from support.worst_bodies import AGENT
from zbv_service.client import AgentClient

DOCUMENT = json.loads((ROOT / "service" / "openapi.json").read_text())


def documents_conform(context: CheckContext, response: Response, case: Case[Any]) -> bool | None:
    """Documents have their schema. That of a stream is a text, which the check takes for an event."""
    is_stream = "event-stream" in response.headers.get("content-type", [""])[0]
    return None if is_stream else response_schema_conformance(context, response, case)


CHECKS = [
    schemathesis.checks.not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    documents_conform,
]
schema = schemathesis.openapi.from_dict(DOCUMENT)
OPERATIONS = {found.ok().label: found.ok() for found in schema.get_all_operations() if isinstance(found, Ok)}


@dataclass
class Known:
    """A service, the ids of its resources, and the statuses that it returned."""

    address: str
    ids: dict[str, str]
    statuses: Counter[int] = field(default_factory=Counter)


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Known]:
    """A service with a plan, a finished search, and a run on an agent."""
    soon = {"agent_heartbeat_seconds": 0.5}
    soon["agent_timeout_seconds"] = 1.5  # agents wait for work at most half as long
    with (
        live_service(tmp_path_factory.mktemp("schema"), "honest", max_cells=64, **soon) as live,
        AgentClient(live.address) as client,
    ):
        plan_id = client.import_plan(PLAN)
        client.register_agent(AGENT)
        run = client.submit_run(plan_id, {"factory": "a.b:c"}, nodes=1, steps=1)
        search = client.wait(client.submit(PLAN["problem"], {"effort": "quick"}).id, timeout=DEADLINE)
        ids = {"plan_id": plan_id, "agent_id": AGENT["id"], "run_id": run.id, "search_id": search.id}
        yield Known(live.address, ids)


# schemathesis would give all these tests the same name, and pytest-xdist runs only one test per name.
@pytest.mark.parametrize("label", OPERATIONS)
def test_every_operation_responds_as_documented(label: str, known: Known) -> None:
    numbers = count()

    @given(OPERATIONS[label].as_strategy())
    @examples(
        max_examples=3,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def holds(case: Case[Any]) -> None:
        if next(numbers) % 2 == 0:  # every second request has valid ids
            for name in case.path_parameters or {}:
                case.path_parameters[name] = known.ids.get(name, case.path_parameters[name])
        answer = case.call_and_validate(base_url=known.address, checks=CHECKS, timeout=DEADLINE)
        known.statuses[answer.status_code] += 1

    holds()


def test_every_operation_is_tested() -> None:
    assert len(OPERATIONS) == sum(len(methods) for methods in DOCUMENT["paths"].values())


def test_requests_with_valid_ids_are_among_them(known: Known) -> None:
    for label in ("POST /v1/layouts", "GET /v1/plans/{plan_id}", "DELETE /v1/agents/{agent_id}"):
        test_every_operation_responds_as_documented(label, known)
    assert {200, 204, 404, 422} <= set(known.statuses)
