"""The service's answers as frozen objects, and the functions that read and validate them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

import httpx
from pydantic import AliasChoices, Field, StrictBool, TypeAdapter, ValidationError
from zbv_solver.errors import InvalidInput, Issue
from zbv_solver.plans.channels import Channel, Transfer
from zbv_solver.plans.orders import Action, Orders
from zbv_solver.plans.plan import Plan
from zbv_solver.plans.reading import parse_plan

from zbv_service.client.calls import decoded
from zbv_service.client.errors import InvalidAnswer

T = TypeVar("T")


@dataclass(frozen=True)
class Search:
    """A search. ``objective``, ``lower_bound`` and ``gap`` are the best known so far."""

    id: str
    state: str
    objective: float | None
    """Of layouts, the seconds of the step of the best one so far."""
    lower_bound: float | None
    """No plan or layout has a smaller objective."""
    gap: float | None
    plan_id: str | None
    """Of layouts, the plan of the best layout's pipeline."""
    error: dict[str, Any] | None
    created_at: datetime
    method: str | None = None
    attempts: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    kind: str = "plan"
    """``plan`` or ``layouts``; ``progress`` and ``answer`` are of ``layouts``."""
    summary: Annotated[dict[str, Any], Field(validation_alias=AliasChoices("problem_summary", "summary"))] = (
        field(default_factory=dict)
    )
    progress: dict[str, int] | None = None
    """How many layouts were ``considered``, ``ruled_out`` and ``planned``."""
    answer: dict[str, Any] | None = None
    """The ranking, once the search has ended; lists leave it out."""
    name: str | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the state is final."""
        return self.state not in ("queued", "running")

    def after(self, event: Event) -> Search:
        """The search with the changes of an event."""
        results = ("objective", "lower_bound", "gap", "method", "progress", "plan_id", "error")
        known = ("state", "attempts", *results)
        return replace(self, **{name: event.data[name] for name in known if name in event.data})


@dataclass(frozen=True)
class Event:
    """An event of a search."""

    id: str
    """The position in the stream; give it as ``last_event_id`` to continue after this event."""
    kind: str
    """``state``, ``improvement``, ``bound``, ``progress`` (of layouts) or ``end``."""
    data: dict[str, Any]
    """The changed members of the search, with the names of :class:`Search`."""


@dataclass(frozen=True)
class SearchPage:
    """One page of the list of searches, newest first; ``next`` is the next page's path, None at the end."""

    searches: tuple[Search, ...]
    # A path, because the client would send its token to any other address.
    next: Annotated[str, Field(pattern="^/v1/")] | None


@dataclass(frozen=True)
class Check:
    """What the service finds out about a problem without searching."""

    issues: tuple[Issue, ...]
    """Every broken rule; the pointers refer to the request."""
    facts: dict[str, Any] | None
    """Derived numbers, with the API's names; None when a rule is broken or the problem has layers."""
    layers: dict[str, Any] | None = None
    """Derived numbers of a problem whose layers are not yet divided into stages."""
    plan: dict[str, Any] | None = None
    """The check of the plan that was sent: ``is_valid``, ``issues``, and ``claims`` with ``is_verified``."""

    @property
    def is_valid(self) -> bool:
        """Whether the service would accept a search of the problem."""
        return not self.issues


@dataclass(frozen=True)
class Estimate:
    """The result of a search of a fraction of a second."""

    lower_bound: float
    """No plan of the problem has a smaller objective."""
    plan: dict[str, Any] | None
    """Metrics of a verified plan, with the API's names; None when the problem is too large."""
    baselines: tuple[dict[str, Any], ...]
    """The classical schedules, as in a plan document."""


@dataclass(frozen=True)
class RankPlan:
    """One rank's part of a plan."""

    plan_id: str
    rank: int
    pp_degree: int
    microbatches: int
    placement: str
    chunks: int
    """Stages per rank."""
    stages: tuple[int, ...]
    """The rank's stages in model order."""
    actions: tuple[Action, ...]
    peers: tuple[int, ...]
    """The ranks with which it exchanges tensors."""
    channels: tuple[Channel, ...]
    """Its transfers by peer and direction, in the order in which the sending rank produces them."""
    partition: tuple[tuple[str, ...], ...] | None = None
    """The layer names of every stage of the model; None when the plan does not contain layers."""
    recompute: tuple[StrictBool, ...] | None = None
    """For each stage of the model, whether it is recomputed; None when the plan does not say."""
    measured: dict[str, str] = field(default_factory=dict)
    """The program whose costs were planned with; empty when the plan does not say."""
    features: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """The values of every feature, by microbatch; empty when all microbatches are equal."""
    pairs: tuple[int, ...] = ()
    """The places in ``actions`` of the F's that run as a pair with the action after them."""
    copies: tuple[tuple[int, Action], ...] = ()
    """Copies to the host in their order, each with the place in ``actions`` of the action after it."""


@dataclass(frozen=True)
class Run:
    """A run; ``document`` is the whole answer. ``plan_id`` is None while its plan is being searched."""

    id: str
    state: str
    plan_id: str | None
    error: dict[str, Any] | None
    document: dict[str, Any]
    name: str | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the state is final."""
        return self.state in ("succeeded", "failed", "cancelled")

    @property
    def failures(self) -> list[dict[str, Any]]:
        """``agent``, ``rank``, ``action``, ``peer`` and ``detail`` of each failure, root causes first."""
        return list((self.error or {}).get("failures") or [])


@dataclass(frozen=True)
class RankChannel:
    """A channel as the service describes it to one of its two ranks."""

    peer: int
    direction: Literal["send", "receive"]
    transfers: tuple[str, ...]

    def seen_from(self, rank: int) -> Channel:
        """The channel of ``rank``; raises :class:`InvalidInput` for a malformed transfer."""
        sender, receiver = (rank, self.peer) if self.direction == "send" else (self.peer, rank)
        return Channel(sender, receiver, tuple(map(Transfer.parse, self.transfers)))


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def parse(kind: type[T], answer: Any) -> T:
    """A decoded answer as an object of a type; raises :class:`InvalidAnswer`.

    Unknown members are ignored, because a newer service may send more.
    """
    try:
        result: T = _adapter(kind).validate_python(answer)  # type: ignore[arg-type]  # classes are hashable
    except ValidationError as error:
        first = error.errors()[0]
        place = "/".join(map(str, first["loc"]))
        raise InvalidAnswer(
            f"the answer breaks a rule at {place!r}: {first['msg']}. Is this a zbv service?"
        ) from None
    return result


def member(answer: Any, key: str) -> Any:
    """A required member of an answer; raises :class:`InvalidAnswer`."""
    if not isinstance(answer, dict) or key not in answer:
        raise InvalidAnswer(f"the answer has no {key!r}; is this a zbv service?")
    return answer[key]


def as_type(kind: type[T], key: str | None = None) -> Callable[[httpx.Response], T]:
    """A reader of JSON responses: :func:`parse` of the answer, or of its member ``key``."""

    def read(response: httpx.Response) -> T:
        answer = decoded(response)
        return parse(kind, answer if key is None else member(answer, key))

    return read


def read_plan(plan_id: str, answer: dict[str, Any]) -> Plan:
    """Read a plan and verify that it hashes to its id."""
    try:
        plan = parse_plan(answer)
    except InvalidInput as error:
        raise InvalidAnswer(f"the service's plan {plan_id} is not a valid plan: {error}") from error
    if plan.plan_id != plan_id:
        raise InvalidAnswer(f"asked for plan {plan_id}, but the answer is plan {plan.plan_id}.")
    return plan


def read_rank(answer: Any) -> RankPlan:
    """Read one rank's part of a plan."""
    rank = parse(int, member(answer, "rank"))
    found = parse(tuple[RankChannel, ...], member(answer, "channels"))
    actions = parse(tuple[str, ...], member(answer, "actions"))
    try:
        channels = tuple(channel.seen_from(rank) for channel in found)
        orders = Orders.from_text([actions])
        parsed = {
            "actions": tuple(orders.actions(0)),
            "pairs": orders.pairs(0),
            "copies": orders.copies_of(0),
            "channels": channels,
        }
    except InvalidInput as error:
        raise InvalidAnswer(f"cannot read the answer for a rank: {error}") from error
    return parse(RankPlan, {**answer, **parsed})


def read_run(answer: Any) -> Run:
    """Read a run."""
    return parse(Run, {**parse(dict[str, Any], answer), "document": answer})
