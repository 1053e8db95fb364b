"""Accepts and reads searches of layouts, which are searches of another kind."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from functools import partial
from typing import Any, ClassVar

from zbv_solver import __version__
from zbv_solver.documents.files import canonical_json

from zbv_service.documents.layouts import LayoutRequest, layouts_summary, read_layouts
from zbv_service.documents.packing import pack
from zbv_service.documents.parsing import parse_body, parse_json
from zbv_service.records.searches import NewSearch, SearchKind, SearchRecord
from zbv_service.searches.layout_documents import LayoutSearchDocument
from zbv_service.searches.searches import Searches, require_allowed
from zbv_service.settings import Settings


class LayoutSearches(Searches):
    """The searches of a service for layouts."""

    kind: ClassVar[SearchKind] = "layouts"
    address: ClassVar[str] = "/v1/layouts"

    async def _read(self, body: Any) -> NewSearch:
        # Enumerating the layouts of a large cluster takes seconds.
        return await self._computations.run(partial(read_layout_search, self._settings), body)

    async def answer(self, record: SearchRecord) -> bytes | None:
        """The packed answer of a search; None before its end."""
        return await self._table.answer(record.id)

    async def text(self, record: SearchRecord) -> bytes:
        """The document of a search with its answer, as JSON."""
        packed, queued_before = await self.answer(record), await self.queued_before(record)
        return await asyncio.to_thread(LayoutSearchDocument.text_of, record, queued_before, packed)


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
