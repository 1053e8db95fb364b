"""Searches: what the database stores of them, and what the API sends."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from zbv_solver.documents.fields import Number
from zbv_solver.problem.jitter import (
    LARGEST_QUANTILE,
    LEAST_QUANTILE,
    ActionsDocument,
    JitterDocument,
    SamplesDocument,
)

from zbv_service.errors import StoredError
from zbv_service.records.plans import NewPlan, Refusal
from zbv_service.records.shared import (
    MAX_SEED,
    NEXT,
    ProblemSummary,
    Record,
    RequestDocument,
    json_with,
)

SearchState = Literal["queued", "running", "done", "cancelled", "failed", "infeasible"]
SearchKind = Literal["plan", "layouts"]
"""What is searched: a plan for a problem, or the layouts of a model on a cluster."""
EventKind = Literal["state", "improvement", "bound", "progress", "end"]
SEARCH_STATES: tuple[str, ...] = get_args(SearchState)

MOST_SAMPLES = 20_000
"""Most samples of the options of a search: they are read, sent and stored with it."""

FINISHED: frozenset[str] = frozenset({"done", "cancelled", "failed", "infeasible"})
"""States that never change again."""


def _require_few_samples(jitter: JitterDocument) -> JitterDocument:
    spreads: list[Any] = [jitter.transfer]
    spreads += (
        [*vars(jitter.action).values()] if isinstance(jitter.action, ActionsDocument) else [jitter.action]
    )
    spreads += jitter.rank if isinstance(jitter.rank, list) else [jitter.rank]
    found = sum(len(each.samples) for each in spreads if isinstance(each, SamplesDocument))
    if found > MOST_SAMPLES:
        raise ValueError(f"has {found} samples in all; this service takes at most {MOST_SAMPLES}")
    return jitter


class OptionsDocument(RequestDocument):
    """How hard to search. Equal options and seed give equal plans, unless a time limit cuts them off."""

    effort: Literal["quick", "standard", "thorough"] = "standard"
    time_limit: Annotated[Number, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="Seconds; null means that effort alone decides."
    )
    seed: Annotated[int, Field(strict=True, ge=0, le=MAX_SEED)] = 0
    jitter: Annotated[JitterDocument, AfterValidator(_require_few_samples)] | None = Field(
        None,
        description="By how much durations vary. With it, the plan is chosen for its simulated time, and has "
        f"a `simulation`. At most {MOST_SAMPLES} samples in all. Lists of searches leave it out.",
    )
    quantile: Annotated[Number, Field(ge=LEAST_QUANTILE, le=LARGEST_QUANTILE)] | None = Field(
        None,
        description="With jitter, the quantile of the simulated times to choose for; null is their mean.",
    )

    def stored(self) -> dict[str, Any]:
        """The options as they are stored and hashed: jitter and quantile only if they are given."""
        absent = {name for name in ("jitter", "quantile") if getattr(self, name) is None}
        return self.model_dump(exclude=absent)


@dataclass(frozen=True)
class NewSearch:
    """A search as it is accepted."""

    id: str
    request_key: str
    """Hash of the request and the version; requests with equal keys share one search."""
    problem: bytes
    """The normalised problem document, packed; of a search for layouts, the request."""
    summary: dict[str, Any]
    """The few numbers of the problem that lists show."""
    options: dict[str, Any]
    """Those of the request, except for the jitter."""
    created_by: str | None = None
    """Name of the token that submitted it; None without authentication."""
    kind: SearchKind = "plan"
    jitter: bytes | None = None
    """The document of the jitter, packed."""
    name: str | None = None
    """Not part of the content, so requests with other names share the search."""


class SearchRecord(Record):
    """What searches of all kinds have in common, without their bulky parts (problem, incumbent, answer)."""

    id: str
    kind: SearchKind
    """`plan`: a plan for a problem. `layouts`: the best layouts of a model on a cluster."""
    name: str | None = None
    """The newest name that a request gave it."""
    state: SearchState
    objective: float | None = None
    lower_bound: float | None = None
    gap: float | None = None
    method: str | None = None
    plan_id: str | None = None
    """Set once the search is done, or cancelled with a plan."""
    error: StoredError | None = None
    """Why there is no plan."""
    cancel_requested: bool = False
    queued_before: int | None = None
    """Searches that start before a queued one; only where one search is asked for."""
    attempts: int = 0
    """How often the search was started; more than 1 after a restart."""
    created_at: datetime
    started_at: datetime | None = None
    updated_at: datetime
    finished_at: datetime | None = None
    crashes: int = Field(0, exclude=True)
    """How often its process died."""
    created_by: str | None = Field(None, exclude=True)
    """Name of the token that submitted it; None without authentication."""
    is_wanted_by_client: bool = Field(True, exclude=True)
    """Whether a client has submitted it. Otherwise only runs that wait for its plan have."""
    jitter: bytes | None = Field(None, exclude=True)
    """As in :class:`NewSearch`; None in lists."""

    def whole(self, answer: bytes | None) -> bytes:
        """The document as JSON with its bulky parts; ``answer`` is the packed answer of this search."""
        if answer is None:
            return self.model_dump_json().encode()
        return json_with(self.model_dump(mode="json"), answer=zlib.decompress(answer))


class SearchDocument(SearchRecord):
    """A search for a plan, running or ended.

    ``objective``, ``lower_bound`` and ``gap`` are those of the best plan known so far.
    """

    kind: Literal["plan"] = "plan"
    summary: ProblemSummary = Field(serialization_alias="problem_summary")
    options: OptionsDocument

    def whole(self, answer: bytes | None = None) -> bytes:
        """The document as JSON, with its jitter."""
        if self.jitter is None:
            return self.model_dump_json().encode()
        document = self.model_dump(mode="json")
        options = json_with(document["options"], jitter=zlib.decompress(self.jitter))
        return json_with(document, options=options)


class LayoutsSummary(BaseModel):
    """The few values that name a request for layouts."""

    model: str | None = Field(None, description="Its presets, or the `model_type` of a `config.json`.")
    device: str | None = Field(None, description="The preset of the devices.")
    devices: int
    global_batch: int
    sequence_length: int
    layouts: int = Field(description="How many divide the cluster, the model and the global batch.")


class LayoutOptions(RequestDocument):
    """How hard to search."""

    effort: Literal["quick", "standard", "thorough"] | None = Field(
        None,
        description="Searches better plans for the most promising layouts; null constructs orders alone.",
    )
    time_limit: Annotated[Number, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None,
        description="Seconds from the start of the search; null means to search until the best layouts are "
        "proved.",
    )


class LayoutCounts(BaseModel):
    """How far a search of layouts is."""

    considered: int = Field(description="Layouts that were enumerated.")
    ruled_out: int = Field(description="Layouts that do not fit, or whose bound is too large.")
    planned: int = Field(description="Layouts whose pipeline was planned.")


class LayoutSearchDocument(SearchRecord):
    """A search for layouts, running or ended.

    ``objective`` is the step time of the best layout so far, ``lower_bound`` a time that no layout undercuts,
    both in seconds, and ``plan_id`` the plan of the best layout's pipeline.
    """

    kind: Literal["layouts"] = "layouts"
    summary: LayoutsSummary
    options: LayoutOptions
    progress: LayoutCounts | None = None
    answer: dict[str, Any] | None = None
    """As `zbv layout -o` writes it, with a `plan_id` of each layout in place of its plan. Set once the search
    is done or cancelled; only where one search is asked for."""


AnySearch = Annotated[SearchDocument | LayoutSearchDocument, Field(discriminator="kind")]


class SearchList(BaseModel):
    """Some of the searches, the newest first."""

    searches: list[AnySearch]
    next: str | None = NEXT


@dataclass(frozen=True)
class Claim:
    """A search that a runner has leased, as it is sent to an executor."""

    id: str
    fence: int
    """The runner's writes must carry it, so that they fail after the lease was lost."""
    problem: bytes
    """The packed problem, or the packed request for layouts."""
    options: dict[str, Any]
    """Those of the request; the runner adds ``workers``, the number of threads."""
    incumbent: bytes | None
    """The ranks of the best plan known (:func:`zbv_service.documents.problems.pack_incumbent`)."""
    attempts: int
    cancel_requested: bool
    kind: SearchKind = "plan"
    jitter: bytes | None = None
    created_by: str | None = None


@dataclass(frozen=True)
class Update:
    """A better plan or a better bound of a running search."""

    objective: float | None
    """None as long as no layout was planned."""
    lower_bound: float
    method: str | None
    incumbent: bytes | None
    """The plan's packed ranks; for a problem given by layers, an object of problem and ranks; None for
    layouts."""
    refusal: Refusal | None = None
    """Set if the search could not use its stored incumbent; the results stored with that one are void."""
    progress: dict[str, int] | None = None
    """The :class:`LayoutCounts`. A search that has them cannot continue from an incumbent."""


class SearchEventDocument(Record):
    """An event of a search, the same in a stream and in a list; an event has only some of the fields."""

    model_config = ConfigDict(extra="forbid")

    id: int
    """Increases within the search, possibly with gaps. Pass it back to continue after it."""
    at: datetime
    event: EventKind
    """`state`: the search was queued, started, or asked to stop. `improvement`: a better plan was found.
    `bound`: a better bound was proven for the same plan. `progress`: a search for layouts has a better bound,
    or has ruled out or planned more of them. `end`: the last event of every search."""
    state: SearchState | Literal["discarded"] | None = None
    """Of `state` and `end`."""
    reason: (
        Literal[
            "submitted",
            "started",
            "cancel-requested",
            "service-stopped",
            "service-lost",
            "process-died",
            "process-lost",
            "worker-ended",
        ]
        | None
    ) = None
    """Of `state`."""
    attempts: int | None = None
    """Of `state`: how often the search has been started."""
    cancel_requested: bool | None = None
    """Of `state`."""
    objective: float | None = None
    lower_bound: float | None = None
    gap: float | None = None
    method: str | None = None
    seconds: float | None = None
    """Seconds since the first start of the search; null if it never started. This and the four values above
    are of all events but `state`."""
    progress: LayoutCounts | None = None
    """Of a search for layouts."""
    plan_id: str | None = None
    """Of `end`."""
    error: StoredError | None = None
    """Of `end`."""
    search_id: str = Field(exclude=True)

    @property
    def owner(self) -> str:
        """The search."""
        return self.search_id

    @property
    def number(self) -> int:
        """The id."""
        return self.id

    @property
    def kind(self) -> EventKind:
        """What happened."""
        return self.event


class SearchEventList(BaseModel):
    """The events of a search after a given event."""

    search_id: str
    events: list[SearchEventDocument]
    last_id: int = Field(description="Pass it as `after` to get the next events.")
    is_over: bool = Field(description="Whether the search has ended, so that no event follows these.")

    @classmethod
    def of(cls, search_id: str, events: list[SearchEventDocument], after: int, is_over: bool) -> Self:
        """The events after one; ``is_over`` is whether the search had ended before they were read."""
        is_over = is_over or (bool(events) and events[-1].event == "end")
        last = events[-1].id if events else after
        return cls(search_id=search_id, events=events, last_id=last, is_over=is_over)


@dataclass(frozen=True)
class Outcome:
    """What a search has found in the end, in the form in which it is stored."""

    plans: tuple[NewPlan, ...]
    """The best first: the plan, or those of the pipelines of the listed layouts. Empty if the search was
    stopped before it had one."""
    objective: float | None
    """None without a plan."""
    lower_bound: float
    """Of all answers to the question."""
    answer: bytes | None = None
    """The packed answer, which names the plans; None if the plan is the answer."""
    progress: dict[str, int] | None = None
    refusal: Refusal | None = None
    """Set if the search could not use its stored incumbent."""

    @classmethod
    def of(cls, plan: NewPlan, refusal: Refusal | None = None) -> Self:
        """The outcome of a search for a plan."""
        return cls((plan,), plan.summary.value, plan.search_bound, refusal=refusal)
