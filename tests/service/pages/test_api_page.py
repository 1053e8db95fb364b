"""The reference of the API as a page: every call and document of the OpenAPI document."""

from __future__ import annotations

import json
import re
from typing import Any

from support.serving import Service
from zbv_service.pages.api import METHODS, api_values


async def test_the_page_has_every_call_and_document_and_only_links_that_lead_somewhere(
    service: Service,
) -> None:
    text, document = await service.page("/api"), await service.get("/openapi.json")
    ids = re.findall(r'\bid="([^"]+)"', text)
    operations = [
        entry[method] for entry in document["paths"].values() for method in METHODS if method in entry
    ]
    assert len(operations) > 30
    assert {operation["operationId"] for operation in operations} < set(ids)
    assert set(document["components"]["schemas"]) < set(ids)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"', text)) <= set(ids)
    assert "`" not in text
    for words in (
        "Run a plan, or search a problem&#39;s plan and run it",
        "required",
        "Scope: search.",
        "Public.",
        "Idempotency-Key".lower(),
    ):
        assert words in text, words
    assert 'href="/api" aria-current="page"' in await service.page("/api")


def test_types_are_in_words() -> None:
    def type_of(schema: Any) -> str:
        values = api_values(
            {"paths": {}, "tags": [], "components": {"schemas": {"A": {"properties": {"b": schema}}}}}
        )
        ((_, _, (field,)),) = values["schemas"]
        return "".join(text for text, _ in field.type)

    for schema, words in (
        ({"type": "integer"}, "integer"),
        ({"anyOf": [{"$ref": "#/components/schemas/A"}, {"type": "null"}]}, "A or null"),
        ({"type": "array", "items": {"type": "number"}}, "list of number"),
        ({"enum": ["a", "b"]}, f"{json.dumps('a')} or {json.dumps('b')}"),
        ({"const": 1}, "1"),
        ({"type": ["string", "null"]}, "string or null"),
        ({}, "any"),
    ):
        assert type_of(schema) == words
