"""The reference of the API as a page: every call and document of the OpenAPI document."""

from __future__ import annotations

import re

from support.serving import Service
from zbv_service.pages.api import METHODS


async def test_the_page_has_every_call_and_document_and_no_link_leads_nowhere(service: Service) -> None:
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
    for words in ("required", "Scope: search.", "Public.", "idempotency-key"):
        assert words in text, words
