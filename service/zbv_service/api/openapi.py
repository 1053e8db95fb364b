"""The OpenAPI document: FastAPI's, completed with the schemas of bodies that the service reads itself."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from zbv_solver.measure.rank_trace import RankTraceDocument

from zbv_service.api.openapi_extras import enrich
from zbv_service.api.openapi_security import describe
from zbv_service.errors import ProblemDetails
from zbv_service.plans.documents import PlanDocument, RankDocument
from zbv_service.problems.documents import CheckRequest, CompareRequest, EstimateRequest
from zbv_service.runs.agent_documents import AgentRequest, Heartbeat, NodeEnd, RankEvents
from zbv_service.runs.documents import PlanChange, RunRequest
from zbv_service.searches.documents import SearchRequest

_REF = "#/components/schemas/{model}"
_BODIES = (
    SearchRequest,
    CompareRequest,
    CheckRequest,
    EstimateRequest,
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
            + [(model, "serialization") for model in (RankDocument, ProblemDetails)],
            ref_template=_REF,
        )
        for name, schema in ours["$defs"].items():
            schemas.setdefault(name, schema)
        _drop_framework_errors(made)
        describe(made)
        enrich(made)
        made["components"]["schemas"] = dict(sorted(schemas.items()))
        app.openapi_schema = made
    return app.openapi_schema


def _drop_framework_errors(made: dict[str, Any]) -> None:
    """Remove FastAPI's own validation error from every route, because the service never sends it."""
    for methods in made["paths"].values():
        for operation in methods.values():
            answer = operation["responses"].get("422", {})
            if "application/json" in answer.get("content", {}):
                del operation["responses"]["422"]
    for name in ("HTTPValidationError", "ValidationError"):
        made["components"]["schemas"].pop(name, None)


def body_of(model: type) -> dict[str, Any]:
    """The ``openapi_extra`` of a route that reads a body of this model itself."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def text_body() -> dict[str, Any]:
    """The ``openapi_extra`` of a route that reads plain text."""
    return {"requestBody": {"required": True, "content": {"text/plain": {"schema": {"type": "string"}}}}}


def content_of(model: type, description: str) -> dict[str, Any]:
    """A ``responses`` entry for a response of this model that is sent as stored text."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"description": description, "content": {"application/json": {"schema": schema}}}
