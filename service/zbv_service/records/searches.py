"""What goes into the database and comes out of it, as plain frozen records."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, Literal, TypeVar, get_args

SearchState = Literal["queued", "running", "done", "cancelled", "failed", "infeasible"]
EventKind = Literal["state", "improvement", "bound", "end"]
SEARCH_STATES: tuple[str, ...] = get_args(SearchState)

FINISHED: frozenset[str] = frozenset({"done", "cancelled", "failed", "infeasible"})
"""States that never change again."""


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
    created_at
        None for the moment at which it is stored, on the database's clock.
    created_by
        Name of the token that asked for it; None where nobody has to say who they are.
    """

    id: str
    request_key: str
    problem: bytes
    summary: dict[str, Any]
    options: dict[str, Any]
    created_at: datetime | None = None
    created_by: str | None = None


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
    is_wanted_by_client
        Whether anybody has submitted it for itself; else runs have that wait for its plan.
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
    created_by: str | None = None
    is_wanted_by_client: bool = True


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
class Refusal:
    """A stored incumbent does not fit its problem; the search started without it.

    Attributes
    ----------
    digest
        SHA-256 of the packed incumbent, in hexadecimal.
    reason
        Which rule it breaks.
    """

    digest: str
    reason: str


@dataclass(frozen=True)
class Update:
    """A better plan or a better bound of a running search.

    Attributes
    ----------
    incumbent
        The plan's ranks, packed, or an object of problem and ranks where layers were cut.
    refusal
        Set where the search could not use its stored incumbent: what is stored with it is void.
    """

    objective: float
    lower_bound: float
    gap: float | None
    method: str
    incumbent: bytes
    refusal: Refusal | None = None


@dataclass(frozen=True)
class SearchEvent:
    """Something that happened to a search; ``number`` counts from 1 within it, perhaps with gaps."""

    search_id: str
    number: int
    at: datetime
    kind: EventKind
    data: dict[str, Any]


RequestKind = Literal["search", "run"]
"""What a request that may carry an Idempotency-Key creates."""


@dataclass(frozen=True)
class NamedRequest:
    """A request that its caller gave a name to (the header Idempotency-Key).

    Attributes
    ----------
    key_hash
        Hash of the caller and the name.
    fingerprint
        Hash of the body: the same name must come with the same one.
    kind
        What the request creates: the same name must come to the same address.
    """

    key_hash: str
    fingerprint: str
    expires_at: datetime
    kind: RequestKind = "search"


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
    """A verified plan to be stored.

    Attributes
    ----------
    document
        The whole plan document, packed.
    problem_key
        Hash of its problem (:func:`zbv_service.documents.packing.problem_key`): plans of equal keys can be
        compared.
    cut_bound
        Where layers were cut: no plan of any cut has a smaller objective.
    refusal
        As in :class:`Update`.
    """

    summary: PlanSummary
    document: bytes
    problem_key: str
    cut_bound: float | None = None
    refusal: Refusal | None = None

    @property
    def search_bound(self) -> float:
        """The bound of what was searched, which for layers is that of every cut."""
        return self.summary.lower_bound if self.cut_bound is None else self.cut_bound


T = TypeVar("T")


@dataclass(frozen=True)
class Position:
    """A place in a list that is sorted by creation, the newest first; ``id`` tells equal moments apart.

    What follows it is older, or newer where ``is_newer`` says so.
    """

    created_at: datetime
    id: str
    is_newer: bool = False


@dataclass(frozen=True)
class Page(Generic[T]):
    """Some of a list, the newest first.

    Attributes
    ----------
    next, previous
        Positions from which older and newer items follow; None where there are none.
    """

    items: tuple[T, ...]
    next: Position | None
    previous: Position | None = None


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What lists of searches and of plans are filtered by; None and nothing let everything through.

    Attributes
    ----------
    text
        How the id begins, or that of a search's plan.
    """

    text: str | None = None
    pp_degree: int | None = None
    microbatches: int | None = None
    placement: str | None = None
    objective: str | None = None
    created_after: datetime | None = None
    created_before: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class SearchFilter(Shape):
    """Which searches a list shows: those of all these ``states``, or of any state when there are none."""

    states: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class PlanFilter(Shape):
    """Which plans a list shows; ``status`` is ``optimal`` or ``feasible``."""

    status: str | None = None
