"""Accepts and reads searches of layouts, which are searches of another kind."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from functools import partial
from typing import Any

from zbv_solver import __version__
from zbv_solver.documents.files import canonical_json

from zbv_service.documents.layouts import LayoutRequest, layouts_summary, read_layouts
from zbv_service.documents.packing import pack
from zbv_service.documents.parsing import parse_body, parse_json
from zbv_service.records.searches import LayoutSearchDocument, NewSearch
from zbv_service.searches.searches import SearchesOfKind, require_allowed
from zbv_service.settings import Settings


class LayoutSearches(SearchesOfKind[LayoutSearchDocument]):
    """The searches of a service for layouts."""

    document = LayoutSearchDocument
    kind = "layouts"
    address = "/v1/layouts"

    async def _read(self, body: Any) -> NewSearch:
        # Enumerating the layouts of a large cluster takes seconds.
        return await self._computations.run(partial(read_layout_search, self._settings), body)

    async def answer(self, record: LayoutSearchDocument) -> bytes | None:
        """The packed answer of a search; None before its end."""
        return await self._table.answer(record.id)

    async def text(self, record: LayoutSearchDocument) -> bytes:
        """The document of a search with its answer, as JSON."""
        packed, placed = await self.answer(record), await self.placed(record)
        return await asyncio.to_thread(placed.text, packed)


def read_layout_search(settings: Settings, body: Any) -> NewSearch:
    """The search of a body; runs in another process.

    Parameters
    ----------
    body
        JSON text, or the decoded document.

    Raises
    ------
    InvalidInput
        The body breaks a rule, or no layout divides the cluster.
    ApiError
        400: the body is not JSON.
    """
    document = parse_json(body) if isinstance(body, bytes | bytearray) else body
    asked = parse_body(LayoutRequest, document)
    require_allowed(asked.options.effort, asked.options.time_limit, settings)
    summary = layouts_summary(asked, read_layouts(asked))
    normal, options = asked.model_dump(mode="json"), asked.options.model_dump()
    key = canonical_json({"layouts": normal, "version": __version__})
    return NewSearch(
        id=uuid.uuid4().hex,
        request_key=hashlib.sha256(key.encode()).hexdigest(),
        problem=pack(normal),
        summary=summary,
        options=options,
        kind="layouts",
    )
