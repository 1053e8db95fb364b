"""What the service's answers say, as plain frozen objects; and reading them, distrusting every one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from zbv_solver.errors import InvalidInput, Issue
from zbv_solver.plans.channels import Channel, ChannelKind, Transfer
from zbv_solver.plans.orders import Action
from zbv_solver.plans.plan import Plan, parse_plan

from zbv_service.client.errors import InvalidAnswer


@dataclass(frozen=True)
class Search:
    """A search as the service describes it; ``objective``, ``lower_bound`` and ``gap`` are the best known."""

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
        """Whether its state is final."""
        return self.state not in ("queued", "running")

    def after(self, event: SearchEvent) -> Search:
        """The search as it is after an event."""
        known = ("state", "objective", "lower_bound", "gap", "plan_id", "error", "method", "attempts")
        return replace(self, **{name: event.data[name] for name in known if name in event.data})


@dataclass(frozen=True)
class SearchEvent:
    """Something that happened to a search.

    Attributes
    ----------
    id
        What to give to go on after it.
    kind
        ``state``, ``improvement``, ``bound`` or ``end``.
    data
        What changed, named as in :class:`Search`.
    """

    id: str
    kind: str
    data: dict[str, Any]


@dataclass(frozen=True)
class SearchPage:
    """Some of the searches, the newest first; ``next`` leads to the page after it, None at the end."""

    searches: tuple[Search, ...]
    next: str | None


@dataclass(frozen=True)
class Check:
    """What the service says of a problem before it is searched.

    Attributes
    ----------
    issues
        Every broken rule; pointers are into what was sent.
    facts
        What its numbers mean, as the API names it; None when a rule is broken, or the stages are unknown.
    layers
        In place of facts, of layers that are still to be cut.
    plan
        Of the plan that was sent along: ``is_valid``, ``issues``, and its ``claims`` with ``is_verified``.
    """

    issues: tuple[Issue, ...]
    facts: dict[str, Any] | None
    layers: dict[str, Any] | None = None
    plan: dict[str, Any] | None = None

    @property
    def is_valid(self) -> bool:
        """Whether a search of it would be accepted."""
        return not self.issues


@dataclass(frozen=True)
class Estimate:
    """What a moment's search reaches on a problem.

    Attributes
    ----------
    lower_bound
        No plan of the problem has a smaller objective.
    plan
        Metrics of a verified plan, as the API names them; None of a problem that is too large for one.
    baselines
        The classical schedules, as in a plan's document.
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
        The ranks it exchanges tensors with.
    channels
        What it sends and receives, in the order in which the sending rank produces it.
    partition
        The layer names of every stage, of all ranks; None where the plan knows of no layers.
    recompute
        Of every stage, whether it is recomputed; None where the plan does not say.
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


def member(answer: Any, key: str) -> Any:
    """A member of an answer that must have it; raises :class:`InvalidAnswer`."""
    if not isinstance(answer, dict) or key not in answer:
        raise InvalidAnswer(f"the answer has no {key!r}; is this a zbv service?")
    return answer[key]


def read_object(answer: Any) -> dict[str, Any]:
    """An answer that is a JSON object."""
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
    """A search."""
    fields = {name: member(answer, name) for name in _SEARCH}
    try:
        created_at = datetime.fromisoformat(member(answer, "created_at"))
    except (TypeError, ValueError):
        raise InvalidAnswer(f"found created_at {answer['created_at']!r}; it must be a moment.") from None
    return Search(**fields, created_at=created_at)


def read_search_page(answer: Any) -> SearchPage:
    """A page of searches."""
    searches, after = member(answer, "searches"), member(answer, "next")
    if not isinstance(searches, list):
        raise InvalidAnswer(f"found {type(searches).__name__} for searches; it must be a list.")
    # An address elsewhere would be sent the token.
    if not (after is None or (isinstance(after, str) and after.startswith("/v1/"))):
        raise InvalidAnswer(f"found {after!r} for the next page; it must be an address of this service.")
    return SearchPage(tuple(map(read_search, searches)), after)


def read_check(answer: Any) -> Check:
    """What is said of a problem."""
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
    """What a moment's search reached."""
    bound, plan = member(answer, "lower_bound"), member(answer, "plan")
    baselines = member(answer, "baselines")
    if not isinstance(bound, int | float) or not isinstance(baselines, list):
        raise InvalidAnswer("found no estimate; it must have a number as its bound, and a list of baselines.")
    own = None if plan is None else read_object(plan)
    return Estimate(float(bound), own, tuple(map(read_object, baselines)))


def read_plan(plan_id: str, answer: Any) -> Plan:
    """A plan; that it hashes to its id is checked here."""
    try:
        plan = parse_plan(read_object(answer))
    except InvalidInput as error:
        raise InvalidAnswer(f"the service's plan {plan_id} is not one: {error}") from error
    if plan.plan_id != plan_id:
        raise InvalidAnswer(f"asked for plan {plan_id}, and the answer is plan {plan.plan_id}.")
    return plan


def read_rank(answer: Any) -> RankPlan:
    """One rank's part of a plan."""
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
        raise InvalidAnswer(f"the answer for a rank cannot be read: {error}") from error


def _partition(answer: Any) -> tuple[tuple[str, ...], ...] | None:
    if answer is None:
        return None
    is_one = isinstance(answer, list) and all(
        isinstance(names, list) and all(isinstance(name, str) for name in names) for names in answer
    )
    if not is_one:
        raise InvalidAnswer("found a partition that is no list of lists of layer names.")
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
