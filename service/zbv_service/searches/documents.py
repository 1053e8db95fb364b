"""JSON documents of searches, as pydantic models; they are named schemas of the API."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from zbv_service.documents.packing import unpack_text
from zbv_service.documents.problems import QuestionDocument
from zbv_service.errors import ErrorDetails
from zbv_service.records.searches import SearchRecord, SearchState
from zbv_service.records.shared import (
    NEXT,
    PREVIOUS,
    OptionsDocument,
    ProblemSummary,
    RequestDocument,
    json_bytes,
    json_with,
)


class SearchRequest(RequestDocument):
    """A problem to search a plan for."""

    problem: QuestionDocument
    options: OptionsDocument = OptionsDocument()


class StoredSearch(BaseModel):
    """What the documents of all searches have in common."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    state: SearchState
    objective: float | None = None
    lower_bound: float | None = None
    gap: float | None = None
    method: str | None = None
    plan_id: str | None = Field(None, description="Set once the search is done, or cancelled with a plan.")
    error: ErrorDetails | None = Field(None, description="Why there is no plan.")
    cancel_requested: bool = False
    queued_before: int | None = Field(
        None, description="Searches that start before a queued one; only where one search is asked for."
    )
    attempts: int = Field(0, description="How often the search was started; more than 1 after a restart.")
    created_at: datetime
    started_at: datetime | None = None
    updated_at: datetime
    finished_at: datetime | None = None

    def json_bytes(self) -> bytes:
        """The document as UTF-8 JSON."""
        return json_bytes(self.as_json())

    def as_json(self) -> dict[str, Any]:
        """The document before it is written as text."""
        document: dict[str, Any] = self.model_dump(mode="json")
        if self.error is not None:
            document["error"] = self.error.model_dump(mode="json", exclude_none=True)
        return document


class SearchDocument(StoredSearch):
    """A search, running or ended.

    ``objective``, ``lower_bound`` and ``gap`` are those of the best plan known so far.
    """

    problem_summary: ProblemSummary = Field(validation_alias="summary")
    options: OptionsDocument

    @classmethod
    def of(cls, record: SearchRecord, queued_before: int | None = None) -> SearchDocument:
        """The document of a stored search."""
        document = cls.model_validate(record)
        document.queued_before = queued_before
        return document

    @classmethod
    def text_of(cls, record: SearchRecord, queued_before: int | None = None) -> bytes:
        """The document of a stored search as JSON, with its jitter."""
        document = cls.of(record, queued_before).as_json()
        if record.jitter is None:
            return json_bytes(document)
        return json_with(document, options=json_with(document["options"], jitter=unpack_text(record.jitter)))


class SearchList(BaseModel):
    """Some of the searches, the newest first."""

    searches: list[SearchDocument]
    next: str | None = NEXT
    previous: str | None = PREVIOUS

    def json_bytes(self) -> bytes:
        """The document as UTF-8 JSON."""
        searches = [search.as_json() for search in self.searches]
        return json_bytes({"searches": searches, "next": self.next, "previous": self.previous})
