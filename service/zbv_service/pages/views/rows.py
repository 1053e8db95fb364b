"""Rows of the lists on pages."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True)
class SearchEntry:
    """A search in the list.

    Attributes
    ----------
    state
        queued, running, done, cancelled, failed or infeasible.
    value
        The incumbent's objective, in ``time_unit``; None if there is none yet.
    gap
        value / lower bound - 1; None when not known.
    plan_id
        The plan found; None if there is none yet.
    error
        Why it failed or is infeasible.
    """

    id: str
    state: str
    pp_degree: int
    microbatches: int
    objective: str
    created_at: datetime
    value: float | None = None
    gap: float | None = None
    plan_id: str | None = None
    error: str | None = None
    time_unit: str | None = None


@dataclass(frozen=True)
class PlanEntry:
    """A stored plan in the list; ``value`` is its objective in ``time_unit``."""

    plan_id: str
    pp_degree: int
    microbatches: int
    objective: str
    value: float
    bubble_rate: float
    gap: float | None
    status: str
    created_at: datetime
    method: str = ""
    time_unit: str | None = None


@dataclass(frozen=True)
class RunEntry:
    """A run in the list.

    Attributes
    ----------
    state
        planning, waiting, starting, running, succeeded, failed or cancelled.
    model
        The factory of what is trained, ``package.module:factory``.
    step
        The step that all ranks have reached, counted from 0; None before the first.
    has_offer
        Whether a better plan was found.
    """

    id: str
    state: str
    model: str
    nodes: int
    ranks: int
    steps: int
    step: int | None
    generation: int
    created_at: datetime
    plan_id: str | None = None
    search_id: str | None = None
    error: str | None = None
    has_offer: bool = False


@dataclass(frozen=True)
class AgentEntry:
    """An agent in the list; equal ``devices`` are counted: ``8 × NVIDIA H200``."""

    id: str
    name: str
    state: str
    address: str
    slots: int
    devices: str
    allowed_models: tuple[str, ...]
    created_at: datetime
    seen_at: datetime
    run_id: str | None = None
