"""Searches and plans, as they enter and leave the database."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, Literal, TypeVar, get_args

SearchState = Literal["queued", "running", "done", "cancelled", "failed", "infeasible"]
SearchKind = Literal["plan", "layouts"]
"""What is searched: a plan for a problem, or the layouts of a model on a cluster."""
EventKind = Literal["state", "improvement", "bound", "progress", "end"]
SEARCH_STATES: tuple[str, ...] = get_args(SearchState)

FINISHED: frozenset[str] = frozenset({"done", "cancelled", "failed", "infeasible"})
"""States that never change again."""


@dataclass(frozen=True)
class NewSearch:
    """A search as it is accepted."""

    id: str
    request_key: str
    """Hash of problem, options and version; requests with equal keys share one search."""
    problem: bytes
    """The normalised problem document, packed; of a search of layouts, the request."""
    summary: dict[str, Any]
    """The few numbers of the problem that lists show."""
    options: dict[str, Any]
    """Those of the request, except for the jitter."""
    created_by: str | None = None
    """Name of the token that submitted it; None without authentication."""
    kind: SearchKind = "plan"
    jitter: bytes | None = None
    """The document of the jitter, packed."""


@dataclass(frozen=True)
class SearchRecord:
    """A search without its bulky parts (problem, incumbent, answer)."""

    id: str
    state: SearchState
    summary: dict[str, Any]
    options: dict[str, Any]
    objective: float | None
    lower_bound: float | None
    gap: float | None
    """Of the best plan known so far; None without a plan. Of a search of layouts, the step of the best
    layout and the bound for all layouts, in seconds."""
    method: str | None
    plan_id: str | None
    error: dict[str, Any] | None
    cancel_requested: bool
    attempts: int
    """How often the search was started."""
    crashes: int
    """How often its process died."""
    created_at: datetime
    started_at: datetime | None
    updated_at: datetime
    finished_at: datetime | None
    created_by: str | None = None
    is_wanted_by_client: bool = True
    """Whether a client has submitted it. Otherwise only runs that wait for its plan have."""
    kind: SearchKind = "plan"
    progress: dict[str, int] | None = None
    """How many layouts were considered, ruled out and planned; None for a plan."""
    jitter: bytes | None = None
    """As in :class:`NewSearch`; None in lists."""


@dataclass(frozen=True)
class Claim:
    """A search that a runner has leased, as it is sent to an executor.

    Attributes
    ----------
    problem, incumbent
        Packed documents: the problem or the request for layouts, and the ranks of the best plan known
        (:func:`zbv_service.documents.packing.pack_incumbent`).
    """

    id: str
    fence: int
    """The runner's writes must carry it, so that they fail after the lease was lost."""
    problem: bytes
    options: dict[str, Any]
    """Those of the request; the runner adds ``workers``, the number of threads."""
    incumbent: bytes | None
    attempts: int
    cancel_requested: bool
    kind: SearchKind = "plan"
    jitter: bytes | None = None
    created_by: str | None = None


@dataclass(frozen=True)
class Refusal:
    """A stored incumbent does not fit its problem, so the search started without it."""

    digest: str
    """SHA-256 of the packed incumbent, in hexadecimal."""
    reason: str
    """The rule that it breaks."""


@dataclass(frozen=True)
class Update:
    """A better plan or a better bound of a running search."""

    objective: float | None
    """None as long as no layout was planned."""
    lower_bound: float
    gap: float | None
    method: str
    incumbent: bytes | None
    """The plan's packed ranks; for a problem given by layers, an object of problem and ranks; None for
    layouts."""
    refusal: Refusal | None = None
    """Set if the search could not use its stored incumbent; the results stored with that one are void."""
    progress: dict[str, int] | None = None


@dataclass(frozen=True)
class SearchEvent:
    """An event of a search; ``number`` increases from 1 within the search, possibly with gaps."""

    search_id: str
    number: int
    at: datetime
    kind: EventKind
    data: dict[str, Any]

    @property
    def owner(self) -> str:
        """The search."""
        return self.search_id


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
    """A verified plan to be stored."""

    summary: PlanSummary
    document: bytes
    """The whole plan document, packed."""
    problem_key: str
    """Hash of its problem (:func:`zbv_service.documents.packing.problem_key`); plans with equal keys can
    be compared."""
    cut_bound: float | None = None
    """For a problem given by layers: a lower bound on the objective over all cuts."""
    refusal: Refusal | None = None
    """As in :class:`Update`."""

    @property
    def search_bound(self) -> float:
        """The lower bound of the search, which for layers holds for every cut."""
        return self.summary.lower_bound if self.cut_bound is None else self.cut_bound


@dataclass(frozen=True)
class NewRanking:
    """The outcome of a search of layouts."""

    plans: tuple[NewPlan, ...]
    """Of the pipelines of the listed layouts, the best layout first; empty if the search was stopped
    before the first."""
    document: bytes
    """The answer, packed; its layouts name their plans."""
    step_time: float | None
    """Seconds, of the best layout; None without a layout."""
    lower_bound: float
    """Seconds, of all layouts."""
    progress: dict[str, int]


Outcome = NewPlan | NewRanking
"""The result of a search."""


T = TypeVar("T")


@dataclass(frozen=True)
class Position:
    """A position in a list sorted by creation, newest first; ``id`` breaks ties.

    The items after it are older, or newer if ``is_newer`` is set.
    """

    created_at: datetime
    id: str
    is_newer: bool = False


@dataclass(frozen=True)
class Page(Generic[T]):
    """A part of a list, newest first."""

    items: tuple[T, ...]
    next: Position | None
    previous: Position | None = None
    """Positions of the older and the newer items; None if there are none."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The filter of lists of searches and plans; empty fields do not restrict them."""

    text: str | None = None
    """The beginning of the id, or of the id of a search's plan."""
    pp_degree: int | None = None
    microbatches: int | None = None
    placement: str | None = None
    objective: str | None = None
    created_after: datetime | None = None
    created_before: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class SearchFilter(Shape):
    """Which searches a list shows: those in one of these states, or in any state if ``states`` is empty."""

    states: frozenset[str] = frozenset()
    kind: SearchKind = "plan"


@dataclass(frozen=True, kw_only=True)
class PlanFilter(Shape):
    """Which plans a list shows; ``status`` is ``optimal`` or ``feasible``."""

    status: str | None = None
