"""The events of a search as JSON: the same objects in a stream and in a list."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, Discriminator, Field

from zbv_service.errors import ProblemDetails


class _Event(BaseModel):
    id: int = Field(
        description="Counts up within the search, perhaps with gaps. Give it back to go on after it."
    )
    at: datetime


class StateEvent(_Event):
    """The search is queued, runs, or is asked to stop."""

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
        "upgraded",
    ]
    attempts: int = Field(description="How often the search was started so far.")
    cancel_requested: bool


class _Found(_Event):
    objective: float
    lower_bound: float
    gap: float | None
    method: str | None
    seconds: float | None = Field(description="Since the search was first started.")


class ImprovementEvent(_Found):
    """A better plan was found."""

    event: Literal["improvement"]


class BoundEvent(_Found):
    """A better bound was proved; the plan is the same."""

    event: Literal["bound"]


class EndEvent(_Event):
    """The search has ended; the last event of every search."""

    event: Literal["end"]
    state: Literal["done", "cancelled", "failed", "infeasible", "discarded"]
    objective: float | None
    lower_bound: float | None
    gap: float | None
    method: str | None
    seconds: float | None = Field(description="Since the search was first started; null when it never was.")
    plan_id: str | None
    error: ProblemDetails | None


SearchEventDocument = Annotated[StateEvent | ImprovementEvent | BoundEvent | EndEvent, Discriminator("event")]


class SearchEventList(BaseModel):
    """What happened to a search after the event that was named."""

    search_id: str
    events: list[SearchEventDocument]
    last_id: int = Field(description="Give it as ``after`` to get what comes next.")
    is_over: bool = Field(description="Whether the search has ended, so that nothing comes after these.")
