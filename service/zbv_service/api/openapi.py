"""The OpenAPI document: FastAPI's, completed with scopes, errors and the schemas of request bodies."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic.json_schema import models_json_schema
from zbv_solver.measure.rank_trace import RankTraceDocument

from zbv_service.api.error_handlers import documented
from zbv_service.api.openapi_extras import enrich
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
