"""The OpenAPI document: committed, valid, and complete; and how far a request walks through the service."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from support.paths import ROOT
from support.serving import Service
from support.walk import FETCH, modules, walk
from zbv_service.api.openapi import EXAMPLES, TAGS
from zbv_service.app import create_app
from zbv_service.commands.cli import main
from zbv_service.settings import Settings

COMMITTED = ROOT / "service" / "openapi.json"


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return create_app(Settings()).openapi()


def operations(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]


def test_the_committed_document_is_the_current_one_and_valid(
    document: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["openapi"]) == 0
    assert json.loads(COMMITTED.read_text()) == json.loads(capsys.readouterr().out), (
        "run: zbv-service openapi > service/openapi.json"
    )
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


async def test_the_examples_are_accepted(service: Service, document: dict[str, Any]) -> None:
    paths = {operation["operationId"]: path for _, path, operation in operations(document)}
    assert EXAMPLES["compare_problem"]["problem"] == EXAMPLES["submit_search"]["problem"]
    for name in ("submit_search", "submit_layouts", "import_plan", "submit_run", "register_agent"):
        answer = await service.http.post(paths[name], json=EXAMPLES[name])
        assert answer.is_success, (name, answer.text)
    beat = paths["beat"].replace("{agent_id}", EXAMPLES["register_agent"]["id"])
    answer = await service.http.post(beat, json=EXAMPLES["beat"])
    assert answer.is_success, answer.text


def test_every_error_is_documented_as_a_problem_document(document: dict[str, Any]) -> None:
    for _, path, operation in operations(document):
        for status, answer in operation["responses"].items():
            if int(status) >= 400:
                content = answer["content"]
                assert list(content) == ["application/problem+json"], (path, status)
                schema = content["application/problem+json"]["schema"]
                assert schema == {"$ref": "#/components/schemas/ErrorDetails"}


pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(("auth", "functions", "of_a_fetch"), [("none", 115, 11), ("tokens", 120, 15)])
async def test_the_walk_from_a_search_to_the_fetch_of_a_rank_is_short(
    tmp_path: Path, auth: Literal["none", "tokens"], functions: int, of_a_fetch: int
) -> None:
    """``PYTHONPATH=tests python -m support.walk`` lists the functions."""
    done = await walk(tmp_path, auth)
    assert len(done.whole) <= functions
    assert len(modules(done.whole)) <= 25
    assert len(done.parts[FETCH]) <= of_a_fetch
