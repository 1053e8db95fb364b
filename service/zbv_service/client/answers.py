"""The service's answers as frozen objects, and the functions that read and validate them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from zbv_solver.errors import InvalidInput, Issue
from zbv_solver.plans.channels import Channel, ChannelKind, Transfer
from zbv_solver.plans.orders import Action
from zbv_solver.plans.plan import Plan
from zbv_solver.plans.reading import parse_plan

from zbv_service.client.errors import InvalidAnswer


@dataclass(frozen=True)
class Search:
    """A search. ``objective``, ``lower_bound`` and ``gap`` are the best known so far."""

    id: str
    state: str
    objective: float | None
    lower_bound: float | None
    gap: float | None
    plan_id: str | None
    error: dict[str, Any] | None
    created_at: datetime
    method: str | None = None
    attempts: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_finished(self) -> bool:
        """Whether the state is final."""
        return self.state not in ("queued", "running")

    def after(self, event: Event) -> Search:
        """The search with the changes of an event."""
        known = ("state", "objective", "lower_bound", "gap", "plan_id", "error", "method", "attempts")
        return replace(self, **{name: event.data[name] for name in known if name in event.data})


@dataclass(frozen=True)
class Event:
    """An event of a search.

    Attributes
    ----------
    id
        The position in the stream; give it as ``last_event_id`` to continue after this event.
    kind
        ``state``, ``improvement``, ``bound`` or ``end``.
    data
        The changed members of the search, with the names of :class:`Search`.
    """

    id: str
    kind: str
    data: dict[str, Any]


@dataclass(frozen=True)
class SearchPage:
    """One page of the list of searches, newest first; ``next`` is the next page's path, None at the end."""

    searches: tuple[Search, ...]
    next: str | None


@dataclass(frozen=True)
class Check:
    """What the service finds out about a problem without searching.

    Attributes
    ----------
    issues
        Every broken rule; the pointers refer to the request.
    facts
        Derived numbers, with the API's names; None when a rule is broken or the problem has layers.
    layers
        Derived numbers of a problem whose layers are not yet divided into stages.
    plan
        The check of the plan that was sent: ``is_valid``, ``issues``, and ``claims`` with ``is_verified``.
    """

    issues: tuple[Issue, ...]
    facts: dict[str, Any] | None
    layers: dict[str, Any] | None = None
    plan: dict[str, Any] | None = None

    @property
    def is_valid(self) -> bool:
        """Whether the service would accept a search of the problem."""
        return not self.issues


@dataclass(frozen=True)
class Estimate:
    """The result of a search of a fraction of a second.

    Attributes
    ----------
    lower_bound
        No plan of the problem has a smaller objective.
    plan
        Metrics of a verified plan, with the API's names; None when the problem is too large.
    baselines
        The classical schedules, as in a plan document.
    """

    lower_bound: float
    plan: dict[str, Any] | None
    baselines: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class RankPlan:
    """One rank's part of a plan.

    Attributes
    ----------
    chunks
        Stages per rank.
    stages
        The rank's stages in model order.
    peers
        The ranks with which it exchanges tensors.
    channels
        Its transfers, in the order in which the sending rank produces them.
    partition
        The layer names of every stage of the model; None when the plan does not contain layers.
    recompute
        For each stage of the model, whether it is recomputed; None when the plan does not say.
    """

    plan_id: str
    rank: int
    pp_degree: int
    microbatches: int
    placement: str
    chunks: int
    stages: tuple[int, ...]
    actions: tuple[Action, ...]
    peers: tuple[int, ...]
    channels: tuple[Channel, ...]
    partition: tuple[tuple[str, ...], ...] | None = None
    recompute: tuple[bool, ...] | None = None


@dataclass(frozen=True)
class Run:
    """A run; ``document`` is the whole answer. ``plan_id`` is None while its plan is being searched."""

    id: str
    state: str
    plan_id: str | None
    error: dict[str, Any] | None
    document: dict[str, Any]

    @property
    def is_finished(self) -> bool:
        """Whether the state is final."""
        return self.state in ("succeeded", "failed", "cancelled")

    @property
    def failures(self) -> list[dict[str, Any]]:
        """``agent``, ``rank``, ``action``, ``peer`` and ``detail`` of each failure, root causes first."""
        return list((self.error or {}).get("failures") or [])


def member(answer: Any, key: str) -> Any:
    """A required member of an answer; raises :class:`InvalidAnswer`."""
    if not isinstance(answer, dict) or key not in answer:
        raise InvalidAnswer(f"the answer has no {key!r}; is this a zbv service?")
    return answer[key]


def read_object(answer: Any) -> dict[str, Any]:
    """An answer that must be a JSON object; raises :class:`InvalidAnswer`."""
    if not isinstance(answer, dict):
        raise InvalidAnswer(f"found {type(answer).__name__}; it must be an object. Is this a zbv service?")
    return answer


_SEARCH = (
    "id",
    "state",
    "objective",
    "lower_bound",
    "gap",
    "plan_id",
    "error",
    "method",
    "attempts",
    "options",
)


def read_search(answer: Any) -> Search:
    """Read a search."""
    fields = {name: member(answer, name) for name in _SEARCH}
    try:
        created_at = datetime.fromisoformat(member(answer, "created_at"))
    except (TypeError, ValueError):
        raise InvalidAnswer(
            f"found created_at {answer['created_at']!r}; it must be a date and time."
        ) from None
    return Search(**fields, created_at=created_at)


def read_search_page(answer: Any) -> SearchPage:
    """Read a page of searches."""
    searches, after = member(answer, "searches"), member(answer, "next")
    if not isinstance(searches, list):
        raise InvalidAnswer(f"found {type(searches).__name__} for searches; it must be a list.")
    # The client would send its token to an address elsewhere.
    if not (after is None or (isinstance(after, str) and after.startswith("/v1/"))):
        raise InvalidAnswer(f"found {after!r} as the next page; it must be a path of this service.")
    return SearchPage(tuple(map(read_search, searches)), after)


def read_check(answer: Any) -> Check:
    """Read the check of a problem."""
    issues, facts = member(answer, "issues"), member(answer, "facts")
    if not isinstance(issues, list):
        raise InvalidAnswer(f"found {type(issues).__name__} for issues; it must be a list.")
    found = (Issue(str(member(each, "pointer")), str(member(each, "detail"))) for each in issues)
    layers, plan = answer.get("layers"), answer.get("plan")
    return Check(
        tuple(found),
        None if facts is None else read_object(facts),
        None if layers is None else read_object(layers),
        None if plan is None else read_object(plan),
    )


def read_estimate(answer: Any) -> Estimate:
    """Read an estimate."""
    bound, plan = member(answer, "lower_bound"), member(answer, "plan")
    baselines = member(answer, "baselines")
    if not isinstance(bound, int | float) or not isinstance(baselines, list):
        raise InvalidAnswer(
            "the answer is not an estimate: lower_bound must be a number, and baselines a list."
        )
    metrics = None if plan is None else read_object(plan)
    return Estimate(float(bound), metrics, tuple(map(read_object, baselines)))


def read_plan(plan_id: str, answer: Any) -> Plan:
    """Read a plan and verify that it hashes to its id."""
    try:
        plan = parse_plan(read_object(answer))
    except InvalidInput as error:
        raise InvalidAnswer(f"the service's plan {plan_id} is not a valid plan: {error}") from error
    if plan.plan_id != plan_id:
        raise InvalidAnswer(f"asked for plan {plan_id}, but the answer is plan {plan.plan_id}.")
    return plan


def read_rank(answer: Any) -> RankPlan:
    """Read one rank's part of a plan."""
    try:
        rank = int(member(answer, "rank"))
        return RankPlan(
            plan_id=str(member(answer, "plan_id")),
            rank=rank,
            pp_degree=int(member(answer, "pp_degree")),
            microbatches=int(member(answer, "microbatches")),
            placement=str(member(answer, "placement")),
            chunks=int(member(answer, "chunks")),
            stages=tuple(member(answer, "stages")),
            actions=tuple(map(Action.parse, member(answer, "actions"))),
            peers=tuple(member(answer, "peers")),
            channels=tuple(_channel(rank, entry) for entry in member(answer, "channels")),
            partition=_partition(answer.get("partition")),
            recompute=_flags(answer.get("recompute")),
        )
    except (InvalidInput, TypeError, ValueError) as error:
        raise InvalidAnswer(f"cannot read the answer for a rank: {error}") from error


def read_run(answer: Any) -> Run:
    """Read a run."""
    fields = {name: member(answer, name) for name in ("id", "state", "plan_id", "error")}
    return Run(**fields, document=dict(answer))


def read_runs(answer: Any) -> list[Run]:
    """Read a list of runs."""
    return [read_run(entry) for entry in member(answer, "runs")]


def _partition(answer: Any) -> tuple[tuple[str, ...], ...] | None:
    if answer is None:
        return None
    is_valid = isinstance(answer, list) and all(
        isinstance(names, list) and all(isinstance(name, str) for name in names) for names in answer
    )
    if not is_valid:
        raise InvalidAnswer("found a partition that is not a list of lists of layer names.")
    return tuple(map(tuple, answer))


def _flags(answer: Any) -> tuple[bool, ...] | None:
    if answer is None:
        return None
    if not isinstance(answer, list) or not all(isinstance(flag, bool) for flag in answer):
        raise InvalidAnswer(f"found recompute {answer!r}; it must be a list of booleans.")
    return tuple(answer)


def _channel(rank: int, entry: Any) -> Channel:
    peer, kind = int(member(entry, "peer")), member(entry, "kind")
    known: dict[str, ChannelKind] = {"activation": "activation", "gradient": "gradient"}
    if kind not in known:
        raise InvalidAnswer(f"found channel kind {kind!r}; must be one of {', '.join(known)}.")
    is_sender = member(entry, "direction") == "send"
    transfers = tuple(map(Transfer.parse, member(entry, "transfers")))
    return Channel(rank if is_sender else peer, peer if is_sender else rank, known[kind], transfers)
