"""``/api``: the reference of the HTTP API, from the service's own OpenAPI document."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from zbv_service.api.state import state_of
from zbv_service.pages.shell import page
from zbv_service.pages.sign_in import get_openapi
from zbv_service.security.access import ANY_TOKEN

METHODS = ("get", "post", "put", "delete")

router = APIRouter(include_in_schema=False)


@router.get("/api", dependencies=[ANY_TOKEN])
async def get_api_page(request: Request) -> HTMLResponse:
    """All calls by subject, and the documents that they take and send."""
    text = bytes((await get_openapi(request)).body)
    values = await state_of(request).computations.write(lambda: api_values(json.loads(text)))
    return await page(request, "api.html.j2", **values)


Type = list[tuple[str, str | None]]
"""Words, each with the name of the schema that it links to."""


@dataclass(frozen=True)
class Field:
    """A parameter of a call, or a member of a document."""

    name: str
    type: Type
    is_required: bool
    text: str


@dataclass(frozen=True)
class Call:
    """One method of one address."""

    id: str
    method: str
    path: str
    summary: str
    text: str
    scopes: str
    """The scopes of a token that it needs; empty if it is public."""
    parameters: Sequence[Field]
    body: Type
    answers: Sequence[tuple[str, str, Type]]
    """Status, description and body of each answer that is no error."""


def api_values(document: Mapping[str, Any]) -> dict[str, Any]:
    """What the template shows of an OpenAPI document."""
    calls = [
        (operation["tags"][0], _call(method, path, operation))
        for path, entry in document["paths"].items()
        for method, operation in entry.items()
        if method in METHODS
    ]
    schemas = document["components"]["schemas"].items()
    return {
        "parts": [
            (tag["name"], tag["description"], [call for name, call in calls if name == tag["name"]])
            for tag in document["tags"]
        ],
        "schemas": [
            (name, schema.get("description", ""), _members(schema)) for name, schema in sorted(schemas)
        ],
    }


def _call(method: str, path: str, operation: Mapping[str, Any]) -> Call:
    scopes = [scope for each in operation.get("security", ()) for scope in each.get("token", ())]
    return Call(
        id=operation["operationId"],
        method=method.upper(),
        path=path,
        summary=operation.get("summary", ""),
        text=operation.get("description", ""),
        scopes=", ".join(scopes) or ("any token" if operation.get("security") else ""),
        parameters=[
            Field(
                each["name"], _type(each["schema"]), each.get("required", False), each.get("description", "")
            )
            for each in operation.get("parameters", ())
        ],
        body=_content(operation.get("requestBody", {})),
        answers=[
            (status, answer["description"], _content(answer))
            for status, answer in operation["responses"].items()
            if status < "400"
        ],
    )


def _content(holder: Mapping[str, Any]) -> Type:
    """The type of a body; its media type if it has no schema."""
    for medium, content in holder.get("content", {}).items():
        return _type(content["schema"]) if content.get("schema") else [(medium, None)]
    return []


def _members(schema: Mapping[str, Any]) -> list[Field]:
    required = schema.get("required", ())
    return [
        Field(name, _type(member), name in required, member.get("description", ""))
        for name, member in schema.get("properties", {}).items()
    ]


def _type(schema: Mapping[str, Any]) -> Type:
    """A type in words: ``list of StepDocument``, ``number or null``."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return [(name, name)]
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            first, *others = map(_type, schema[key])
            return [*first, *(word for other in others for word in ((" or ", None), *other))]
    if "const" in schema or "enum" in schema:
        return [(" or ".join(json.dumps(value) for value in schema.get("enum", [schema.get("const")])), None)]
    if schema.get("type") == "array" and schema.get("items"):
        return [("list of ", None), *_type(schema["items"])]
    name = schema.get("type", "any")
    return [(" or ".join(name) if isinstance(name, list) else name, None)]
