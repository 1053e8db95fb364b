"""JSON documents of a search's events, the same in a stream and in a list."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, Discriminator, Field

from zbv_service.errors import ErrorDetails
from zbv_service.searches.layout_documents import LayoutCounts


class _Event(BaseModel):
    id: int = Field(
        description="Increases within the search, possibly with gaps. Pass it back to continue after it."
    )
    at: datetime


class StateEvent(_Event):
    """The search was queued, started, or asked to stop."""

    event: Literal["state"]
    state: Literal["queued", "running"]
    reason: Literal[
        "submitted",
        "started",
        "cancel-requested",
        "service-stopped",
        "service-lost",
        "process-died",
        "process-lost",
        "worker-ended",
    ]
    attempts: int = Field(description="How often the search has been started.")
    cancel_requested: bool


OF_LAYOUTS = Field(None, description="Of a search for layouts.")


class _Found(_Event):
    objective: float
    lower_bound: float
    gap: float | None
    method: str | None
    seconds: float | None = Field(description="Seconds since the first start of the search.")
    progress: LayoutCounts | None = OF_LAYOUTS


class ImprovementEvent(_Found):
    """A better plan was found."""

    event: Literal["improvement"]


class BoundEvent(_Found):
    """A better bound was proven for the same plan."""

    event: Literal["bound"]


class ProgressEvent(_Event):
    """A search for layouts has a better bound, or has ruled out or planned more of them."""

    event: Literal["progress"]
    objective: float | None
    lower_bound: float
    gap: float | None
    method: str | None
    seconds: float | None
    progress: LayoutCounts


class EndEvent(_Event):
    """The search has ended; the last event of every search."""

    event: Literal["end"]
    state: Literal["done", "cancelled", "failed", "infeasible", "discarded"]
    objective: float | None
    lower_bound: float | None
    gap: float | None
    method: str | None
    seconds: float | None = Field(
        description="Seconds since the first start of the search; null if it never started."
    )
    progress: LayoutCounts | None = OF_LAYOUTS
    plan_id: str | None
    error: ErrorDetails | None


SearchEventDocument = Annotated[
    StateEvent | ImprovementEvent | BoundEvent | ProgressEvent | EndEvent, Discriminator("event")
]


class SearchEventList(BaseModel):
    """The events of a search after a given event."""

    search_id: str
    events: list[SearchEventDocument]
    last_id: int = Field(description="Pass it as `after` to get the next events.")
    is_over: bool = Field(description="Whether the search has ended, so that no event follows these.")
