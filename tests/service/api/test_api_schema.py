"""The API does what its OpenAPI document says, whatever it is sent: no 5xx, and no undocumented answer."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as examples
from schemathesis import Case
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from support import fake_searches
from support.live import listening
from support.paths import ROOT
from support.serving import DEADLINE
from zbv_service.app import create_app
from zbv_service.client import AgentClient
from zbv_service.settings import Settings

from benchmarks.service.malformed import AGENT, PLAN

DOCUMENT = json.loads((ROOT / "service" / "openapi.json").read_text())
CHECKS = [
    schemathesis.checks.not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
schema = schemathesis.openapi.from_dict(DOCUMENT)
OPERATIONS = {found.ok().label: found.ok() for found in schema.get_all_operations() if isinstance(found, Ok)}


@dataclass
class Known:
    """A service, what is there to be asked about, and what it answered."""

    address: str
    ids: dict[str, str]
    asked: int = 0
    statuses: Counter[int] = field(default_factory=Counter)


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Known]:
    """A service that has a plan, a search that ended, and a run on an agent."""
    folder = tmp_path_factory.mktemp("schema")
    settings = Settings(
        auth="none",
        database=f"sqlite:///{folder}/zbv.db",
        searches=1,
        max_cells=64,
        agent_timeout_seconds=1.5,  # half of it is the longest that work is waited for
        agent_heartbeat_seconds=0.5,
    )
    with (
        listening(create_app(settings, search=fake_searches.honest)) as live,
        AgentClient(live.address) as client,
    ):
        plan_id = client.import_plan(PLAN)
        client.register_agent(AGENT)
        run = client.submit_run(plan_id, {"factory": "a.b:c"}, nodes=1, steps=1)
        search = client.wait(client.submit(PLAN["problem"], {"effort": "quick"}).id, timeout=DEADLINE)
        ids = {"plan_id": plan_id, "agent_id": AGENT["id"], "run_id": run.id, "search_id": search.id}
        yield Known(live.address, ids)


# Not the library's own way to make one test of each: they would all have the same name, and of tests of one
# name those who share them out among processes run one.
@pytest.mark.parametrize("label", OPERATIONS)
def test_every_operation_answers_as_it_is_documented(label: str, known: Known) -> None:
    @given(OPERATIONS[label].as_strategy())
    @examples(
        max_examples=10,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def holds(case: Case[Any]) -> None:
        known.asked += 1
        if known.asked % 2:  # of every second request the ids are real ones
            for name in case.path_parameters or {}:
                case.path_parameters[name] = known.ids.get(name, case.path_parameters[name])
        answer = case.call_and_validate(base_url=known.address, checks=CHECKS, timeout=DEADLINE)
        known.statuses[answer.status_code] += 1

    holds()


def test_there_were_answers_of_many_kinds(known: Known) -> None:
    """That the test above tests something."""
    assert len(OPERATIONS) == sum(len(methods) for methods in DOCUMENT["paths"].values())
    assert {200, 202, 204, 404, 422} <= set(known.statuses)
