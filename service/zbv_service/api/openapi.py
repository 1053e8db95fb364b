"""The OpenAPI document: FastAPI's, completed with scopes, errors, request bodies, tags and examples."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic.json_schema import models_json_schema
from zbv_solver.measure.rank_trace import RankTraceDocument

from zbv_service.api.error_handlers import documented
from zbv_service.documents.layouts import LayoutRequest
from zbv_service.documents.problems import SearchRequest
from zbv_service.errors import (
    BODY_TOO_LARGE,
    BODY_TOO_SLOW,
    INSUFFICIENT_SCOPE,
    INVALID_PARAMETER,
    MALFORMED_JSON,
    NOT_FOUND,
    OTHER_ORIGIN,
    UNAUTHENTICATED,
    UNSUPPORTED_MEDIA_TYPE,
    ErrorDetails,
    Kind,
)
from zbv_service.plans.documents import PlanDocument, RankDocument
from zbv_service.problems.documents import CheckRequest, CompareRequest, EstimateRequest, PackRequest
from zbv_service.records.agents import AgentRequest, Heartbeat, NodeEnd, RankEvents
from zbv_service.runs.requests import PlanChange, RunRequest
from zbv_service.security.access import SCHEME
from zbv_service.security.tokens import SCOPES

_REF = "#/components/schemas/{model}"
_BODIES = (
    SearchRequest,
    LayoutRequest,
    CompareRequest,
    CheckRequest,
    EstimateRequest,
    PackRequest,
    PlanDocument,
    RunRequest,
    PlanChange,
    AgentRequest,
    Heartbeat,
    NodeEnd,
    RankEvents,
    RankTraceDocument,
)


def install(app: FastAPI) -> None:
    """Make the application serve :func:`document`."""
    app.openapi = lambda: document(app)  # type: ignore[method-assign]  # FastAPI's documented way


def document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI 3.1 document of an application."""
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
        schemas = made.setdefault("components", {}).setdefault("schemas", {})
        _, ours = models_json_schema(
            [(model, "validation") for model in _BODIES]
            + [(model, "serialization") for model in (RankDocument, ErrorDetails)],
            ref_template=_REF,
        )
        for name, schema in ours["$defs"].items():
            schemas.setdefault(name, schema)
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        for path, methods in made["paths"].items():
            for method, operation in methods.items():
                _add_errors(method, path, operation)
                if "security" in operation:
                    (needed,) = operation["security"]
                    operation["security"] = _alternatives(needed[SCHEME])
        enrich(made)
        made["components"]["schemas"] = dict(sorted(schemas.items()))
        app.openapi_schema = made
    return app.openapi_schema


def _add_errors(method: str, path: str, operation: dict[str, Any]) -> None:
    """Replace FastAPI's validation error, which the service never sends, by the errors that can occur."""
    responses = operation["responses"]
    if "application/json" in responses.get("422", {}).get("content", {}):
        del responses["422"]
    for status, answer in documented(*_common_errors(method, path, operation)).items():
        known = responses.setdefault(str(status), answer)
        if answer["description"] not in known["description"]:
            known["description"] += f"; or: {answer['description']}"


def _common_errors(method: str, path: str, operation: dict[str, Any]) -> list[Kind]:
    """The errors that follow from the parameters, body and scopes of an operation."""
    kinds: list[Kind] = []
    if "security" in operation:
        kinds += [UNAUTHENTICATED, INSUFFICIENT_SCOPE]
        kinds += [] if method == "get" else [OTHER_ORIGIN]
    if "requestBody" in operation:
        kinds += [MALFORMED_JSON, BODY_TOO_LARGE, UNSUPPORTED_MEDIA_TYPE, BODY_TOO_SLOW]
    if "{" in path:
        kinds.append(NOT_FOUND)
    for parameter in operation.get("parameters", ()):
        if parameter["in"] != "path" or parameter["schema"]["type"] != "string":
            kinds.append(INVALID_PARAMETER)
    return kinds


def _alternatives(scopes: list[str]) -> list[dict[str, list[str]]]:
    """One entry per scope, because one scope suffices; scopes in the same entry would all be required."""
    if set(scopes) == set(SCOPES):
        return [{SCHEME: []}]
    return [{SCHEME: [scope]} for scope in scopes]


def operation_id(route: APIRoute) -> str:
    """The id of an operation: the name of its function, by which generated clients call it."""
    return route.name


def body_of(model: type) -> dict[str, Any]:
    """The ``openapi_extra`` of a route that reads a body of this model itself."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def content_of(model: type, description: str) -> dict[str, Any]:
    """A ``responses`` entry for a response of this model that is sent as stored text."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"description": description, "content": {"application/json": {"schema": schema}}}


TAGS = {
    "searches": "Searches for plans, and for the best parallel layouts of a model on a cluster: durable, "
    "resumable, followed by events or by polling.",
    "plans": "Plans, identified by the hash of problem and orders: whole, by rank, or in other formats.",
    "problems": "Checks, estimates, comparisons and packings of problems; nothing is stored.",
    "runs": "Training runs: scheduled on agents, restarted after failures, replanned from measured costs.",
    "agents": "Nodes that run ranks; used by `zbv-worker agent`.",
    "access": "Signing in.",
    "health": "Health and metrics.",
}

PROBLEM: dict[str, Any] = {
    "pp_degree": 4,
    "microbatches": 16,
    "placement": "v",
    "objective": "span",
    "costs": {"forward": 1000, "backward_input": 1100, "backward_weight": 700, "p2p": 50},
    "memory": {"forward": 2, "backward_input": -1, "backward_weight": -1, "static": 0, "limit": 16},
    "units": {"time": "us", "memory": "bytes"},
}
_AGENT = "5f0c4a1e9d2b4c7a8e3f6b1d0c9a8e7f"
_RUN = "0d6f2b8a4c1e4f7b9a3d5e8c7f1b2a6d"
_PLAN = "3b9ac9ff" * 8
EXAMPLES: dict[str, Any] = {
    "submit_layouts": {
        "model": {"presets": ["llama-3.1-8b"]},
        "cluster": {"nodes": 2, "gpus_per_node": 8, "device": "h100"},
        "global_batch": 64,
        "fixed": {"context_parallel": 1},
        "top": 3,
    },
    "submit_search": {"problem": PROBLEM, "options": {"effort": "quick", "time_limit": 10, "seed": 0}},
    "compare_problem": {"problem": PROBLEM},
    "check_problem": {
        "problem": {**PROBLEM, "memory": {"forward": 2, "backward_input": -1, "backward_weight": -1}},
        "limit_fraction": 0.75,
    },
    "estimate_problem": {"problem": PROBLEM},
    "pack_batch": {
        "batch": {
            "sequences": [812, 30144, 655, 1020, 2048, 77, 4096, 940],
            "max_tokens": 32768,
            "replicas": 2,
            "problem": {
                "pp_degree": 4,
                "costs": {
                    "forward": {"tokens": 3.0, "tokens_squared": 5.5e-5},
                    "backward_input": {"tokens": 3.1, "tokens_squared": 1.4e-4},
                    "backward_weight": {"fixed": 400, "tokens": 2.7},
                },
            },
        }
    },
    "import_plan": {
        "problem": {"pp_degree": 1, "microbatches": 1, "costs": PROBLEM["costs"]},
        "ranks": [["0F0", "1F0", "1B0", "0B0"]],
    },
    "submit_run": {
        "problem": PROBLEM,
        "model": {"factory": "mypackage.models:gpt", "arguments": {"layers": 8}, "seed": 0},
        "nodes": 2,
        "steps": 1000,
        "options": {"backend": "nccl", "checkpoint": {"directory": "/shared/run", "every": 100}},
    },
    "change_plan": {"plan_id": _PLAN},
    "register_agent": {
        "id": _AGENT,
        "name": "node-1",
        "address": "10.0.0.1",
        "port": 29500,
        "slots": 2,
        "devices": ["cuda:0", "cuda:1"],
        "allows": {"models": ["mypackage.models.*"]},
    },
    "beat": {"run_id": _RUN, "ranks": [{"rank": 0, "step": 12, "action": "7I3"}]},
    "report_end": {"run_id": _RUN, "generation": 0, "outcome": "succeeded"},
}
"""An example body for each operation that takes one."""


def enrich(document: dict[str, Any]) -> None:
    """Add tags and examples to a document."""
    used = {tag for operation in _operations(document) for tag in operation.get("tags", ())}
    document["tags"] = [{"name": name, "description": text} for name, text in TAGS.items() if name in used]
    for operation in _operations(document):
        name = operation["operationId"]
        for content in operation.get("requestBody", {}).get("content", {}).values():
            if name in EXAMPLES:
                content["example"] = EXAMPLES[name]


def _operations(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [operation for methods in document["paths"].values() for operation in methods.values()]
