"""JSON documents of searches for layouts, as pydantic models; they are named schemas of the API."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from zbv_service.documents.layouts import LayoutOptions
from zbv_service.documents.packing import unpack_text
from zbv_service.records.searches import SearchRecord
from zbv_service.records.shared import NEXT, PREVIOUS, json_bytes, json_with
from zbv_service.searches.documents import StoredSearch


class LayoutsSummary(BaseModel):
    """The few values that name a request for layouts."""

    model: str | None = Field(None, description="Its presets, or the `model_type` of a `config.json`.")
    device: str | None = Field(None, description="The preset of the devices.")
    devices: int
    global_batch: int
    sequence_length: int
    layouts: int = Field(description="How many divide the cluster, the model and the global batch.")


class LayoutCounts(BaseModel):
    """How far a search of layouts is."""

    considered: int = Field(description="Layouts that were enumerated.")
    ruled_out: int = Field(description="Layouts that do not fit, or whose bound is too large.")
    planned: int = Field(description="Layouts whose pipeline was planned.")


class LayoutSearchDocument(StoredSearch):
    """A search for layouts, running or ended.

    ``objective`` is the step time of the best layout so far, ``lower_bound`` a time that no layout undercuts,
    both in seconds, and ``plan_id`` the plan of the best layout's pipeline.
    """

    summary: LayoutsSummary
    options: LayoutOptions
    progress: LayoutCounts | None = None
    answer: dict[str, Any] | None = Field(
        None,
        description="As `zbv layout -o` writes it, with a `plan_id` of each layout in place of its plan. Set "
        "once the search is done or cancelled; only where one search is asked for.",
    )

    @classmethod
    def of(cls, record: SearchRecord, queued_before: int | None = None) -> LayoutSearchDocument:
        """The document of a stored search, without its answer."""
        document = cls.model_validate(record)
        document.queued_before = queued_before
        return document

    @classmethod
    def text_of(cls, record: SearchRecord, queued_before: int | None, packed: bytes | None) -> bytes:
        """The document of a stored search as JSON, with its packed answer, which may be large."""
        document = cls.of(record, queued_before).as_json()
        return json_bytes(document) if packed is None else json_with(document, answer=unpack_text(packed))


class LayoutSearchList(BaseModel):
    """Some of the searches for layouts, the newest first."""

    searches: list[LayoutSearchDocument]
    next: str | None = NEXT
    previous: str | None = PREVIOUS

    def json_bytes(self) -> bytes:
        """The document as UTF-8 JSON."""
        searches = [search.as_json() for search in self.searches]
        return json_bytes({"searches": searches, "next": self.next, "previous": self.previous})
