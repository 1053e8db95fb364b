"""The OpenAPI document: committed, with stable operation ids and named schemas."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from support.paths import ROOT
from support.serving import Serving
from zbv_service.api.openapi_extras import EXAMPLES, TAGS
from zbv_service.app import create_app
from zbv_service.settings import Settings

COMMITTED = ROOT / "service" / "openapi.json"

OPERATIONS = {
    "submit_search": ("post", "/v1/searches"),
    "list_searches": ("get", "/v1/searches"),
    "get_search": ("get", "/v1/searches/{search_id}"),
    "get_search_problem": ("get", "/v1/searches/{search_id}/problem"),
    "cancel_search": ("post", "/v1/searches/{search_id}/cancel"),
    "discard_search": ("delete", "/v1/searches/{search_id}"),
    "follow_search": ("get", "/v1/searches/{search_id}/events"),
    "submit_layouts": ("post", "/v1/layouts"),
    "list_layouts": ("get", "/v1/layouts"),
    "get_layouts": ("get", "/v1/layouts/{search_id}"),
    "get_layouts_request": ("get", "/v1/layouts/{search_id}/request"),
    "cancel_layouts": ("post", "/v1/layouts/{search_id}/cancel"),
    "discard_layouts": ("delete", "/v1/layouts/{search_id}"),
    "follow_layouts": ("get", "/v1/layouts/{search_id}/events"),
    "compare_problem": ("post", "/v1/problems/compare"),
    "check_problem": ("post", "/v1/problems/check"),
    "estimate_problem": ("post", "/v1/problems/estimate"),
    "pack_batch": ("post", "/v1/problems/pack"),
    "list_plans": ("get", "/v1/plans"),
    "import_plan": ("post", "/v1/plans"),
    "get_plan": ("get", "/v1/plans/{plan_id}"),
    "get_rank": ("get", "/v1/plans/{plan_id}/ranks/{rank}"),
    "simulate_plan": ("get", "/v1/plans/{plan_id}/simulation"),
    "export_plan": ("get", "/v1/plans/{plan_id}/export/{format_name}"),
    "submit_run": ("post", "/v1/runs"),
    "list_runs": ("get", "/v1/runs"),
    "get_run": ("get", "/v1/runs/{run_id}"),
    "list_run_events": ("get", "/v1/runs/{run_id}/events"),
    "cancel_run": ("post", "/v1/runs/{run_id}/cancel"),
    "change_plan": ("post", "/v1/runs/{run_id}/plan"),
    "get_run_trace": ("get", "/v1/runs/{run_id}/trace"),
    "get_rank_log": ("get", "/v1/runs/{run_id}/ranks/{rank}/log"),
    "register_agent": ("post", "/v1/agents"),
    "list_agents": ("get", "/v1/agents"),
    "get_agent": ("get", "/v1/agents/{agent_id}"),
    "get_work": ("get", "/v1/agents/{agent_id}/work"),
    "beat": ("post", "/v1/agents/{agent_id}/heartbeat"),
    "report_end": ("post", "/v1/agents/{agent_id}/ended"),
    "put_trace": (
        "put",
        "/v1/agents/{agent_id}/runs/{run_id}/generations/{generation}/ranks/{rank}/trace",
    ),
    "put_log": (
        "put",
        "/v1/agents/{agent_id}/runs/{run_id}/generations/{generation}/ranks/{rank}/log",
    ),
    "put_events": (
        "put",
        "/v1/agents/{agent_id}/runs/{run_id}/generations/{generation}/ranks/{rank}/events",
    ),
    "drain_agent": ("post", "/v1/agents/{agent_id}/drain"),
    "remove_agent": ("delete", "/v1/agents/{agent_id}"),
    "create_sign_in_link": ("post", "/v1/sign-in-links"),
    "get_health": ("get", "/healthz"),
    "get_readiness": ("get", "/readyz"),
    "get_metrics": ("get", "/metrics"),
}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return create_app(Settings()).openapi()


def operations(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]


def test_the_committed_document_is_the_current_one(document: dict[str, Any]) -> None:
    committed = json.loads(COMMITTED.read_text())
    assert committed == json.loads(json.dumps(document)), "run: zbv-service openapi > service/openapi.json"


def test_it_is_openapi_3_1(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1")
    OpenAPIV31SpecValidator(document).validate()


def test_every_tag_is_described(document: dict[str, Any]) -> None:
    used = {tag for _, _, operation in operations(document) for tag in operation["tags"]}
    assert {tag["name"] for tag in document["tags"]} == used == set(TAGS)


def test_every_json_body_has_an_example(document: dict[str, Any]) -> None:
    bodies = {
        operation["operationId"]
        for _, _, operation in operations(document)
        if "application/json" in operation.get("requestBody", {}).get("content", {})
    }
    assert set(EXAMPLES) == bodies - {"put_trace", "put_events"}  # which are only sent by agents


def test_links_name_existing_parameters(document: dict[str, Any]) -> None:
    parameters = {
        operation["operationId"]: {parameter["name"] for parameter in operation["parameters"]}
        for _, _, operation in operations(document)
        if "parameters" in operation
    }
    links = [
        link
        for _, _, operation in operations(document)
        for answer in operation["responses"].values()
        for link in answer.get("links", {}).values()
    ]
    assert links
    for link in links:
        assert set(link["parameters"]) <= parameters[link["operationId"]]


@pytest.mark.anyio
async def test_the_examples_are_accepted(serving: Serving) -> None:
    paths = {name: path for name, (_, path) in OPERATIONS.items()}
    async with serving("immediate") as service:
        assert EXAMPLES["compare_problem"]["problem"] == EXAMPLES["submit_search"]["problem"]
        for name in ("submit_search", "submit_layouts", "import_plan", "submit_run", "register_agent"):
            answer = await service.http.post(paths[name], json=EXAMPLES[name])
            assert answer.is_success, (name, answer.text)
        beat = paths["beat"].replace("{agent_id}", EXAMPLES["register_agent"]["id"])
        answer = await service.http.post(beat, json=EXAMPLES["beat"])
        assert answer.is_success, answer.text


def test_operation_ids_are_stable(document: dict[str, Any]) -> None:
    found = {operation["operationId"]: (method, path) for method, path, operation in operations(document)}
    assert found == OPERATIONS


def test_schemas_are_named_and_complete(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    assert {"ProblemDocument", "SearchRequest", "SearchDocument", "PlanDocument", "RankDocument"} <= set(
        schemas
    )
    assert "ErrorDetails" in schemas
    for reference in references(document):
        prefix, _, name = reference.rpartition("/")
        assert (prefix, name in schemas) == ("#/components/schemas", True), reference


def references(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [found for value in node.values() for found in references(value)]
    return [found for value in node for found in references(value)] if isinstance(node, list) else []


def test_every_error_is_documented_as_a_problem_document(document: dict[str, Any]) -> None:
    for _, path, operation in operations(document):
        for status, answer in operation["responses"].items():
            if int(status) >= 400:
                content = answer["content"]
                assert list(content) == ["application/problem+json"], (path, status)
                schema = content["application/problem+json"]["schema"]
                assert schema == {"$ref": "#/components/schemas/ErrorDetails"}


def test_every_body_is_documented(document: dict[str, Any]) -> None:
    bodies = {}
    for _, _, operation in operations(document):
        if "requestBody" in operation:
            ((media_type, content),) = operation["requestBody"]["content"].items()
            bodies[operation["operationId"]] = content["schema"].get("$ref", media_type)
    assert bodies == {
        "submit_search": "#/components/schemas/SearchRequest",
        "submit_layouts": "#/components/schemas/LayoutRequest",
        "compare_problem": "#/components/schemas/CompareRequest",
        "check_problem": "#/components/schemas/CheckRequest",
        "estimate_problem": "#/components/schemas/EstimateRequest",
        "pack_batch": "#/components/schemas/PackRequest",
        "import_plan": "#/components/schemas/PlanDocument",
        "submit_run": "#/components/schemas/RunRequest",
        "change_plan": "#/components/schemas/PlanChange",
        "put_trace": "#/components/schemas/RankTraceDocument",
        "put_log": "text/plain",
        "put_events": "#/components/schemas/RankEvents",
        "register_agent": "#/components/schemas/AgentRequest",
        "beat": "#/components/schemas/Heartbeat",
        "report_end": "#/components/schemas/NodeEnd",
    }
