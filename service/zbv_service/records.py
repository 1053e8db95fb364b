"""What goes into the database and comes out of it, as plain frozen records."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, get_args

SearchState = Literal["queued", "running", "done", "cancelled", "failed", "infeasible"]
SEARCH_STATES: tuple[str, ...] = get_args(SearchState)

FINISHED: frozenset[str] = frozenset({"done", "cancelled", "failed", "infeasible"})
"""States that never change again."""
ANSWERED: frozenset[str] = frozenset({"done", "infeasible"})
"""States that answer every later request for the same problem and options."""


@dataclass(frozen=True)
class NewSearch:
    """A search as it is accepted.

    Attributes
    ----------
    request_key
        Hash of problem, options and version: equal keys ask the same question.
    problem
        The normalised problem document, packed.
    summary
        The few numbers of the problem that lists show.
    """

    id: str
    request_key: str
    problem: bytes
    summary: dict[str, Any]
    options: dict[str, Any]
    created_at: datetime


@dataclass(frozen=True)
class SearchRecord:
    """A search without its bulky parts (problem, incumbent).

    Attributes
    ----------
    objective, lower_bound, gap
        Of the best plan known so far; None before there is one.
    attempts
        How often the search was started.
    crashes
        How often its process died.
    """

    id: str
    state: SearchState
    summary: dict[str, Any]
    options: dict[str, Any]
    objective: float | None
    lower_bound: float | None
    gap: float | None
    method: str | None
    plan_id: str | None
    error: dict[str, Any] | None
    cancel_requested: bool
    attempts: int
    crashes: int
    created_at: datetime
    started_at: datetime | None
    updated_at: datetime
    finished_at: datetime | None


@dataclass(frozen=True)
class Claim:
    """A search leased to one owner: what is needed to run it, and the fence its writes must carry."""

    id: str
    fence: int
    problem: bytes
    options: dict[str, Any]
    incumbent: bytes | None
    attempts: int
    cancel_requested: bool


@dataclass(frozen=True)
class Update:
    """A better plan or a better bound of a running search; ``incumbent`` is its ranks, packed."""

    objective: float
    lower_bound: float
    gap: float | None
    method: str
    incumbent: bytes


@dataclass(frozen=True)
class PlanSummary:
    """A plan without its action lists."""

    plan_id: str
    pp_degree: int
    microbatches: int
    placement: str
    objective: str
    value: float
    lower_bound: float
    gap: float | None
    status: str
    bubble_rate: float
    method: str
    time_unit: str | None
    created_at: datetime


@dataclass(frozen=True)
class NewPlan:
    """A verified plan to be stored; ``document`` is its whole document, packed."""

    summary: PlanSummary
    document: bytes
