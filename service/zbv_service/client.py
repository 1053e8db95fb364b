"""A thin client of the service: needs httpx and the plan format, no web framework and no database.

Errors::

    ClientError
    ├── ServiceUnreachable   no answer: connection refused, timed out, cut off
    ├── ServiceError         an answer that is a problem document (RFC 9457)
    │   ├── InvalidRequest   4xx: the request is wrong; asking again changes nothing
    │   │   └── NotFound     404
    │   └── ServiceFailed    5xx
    ├── SearchEnded          the search ended without a plan: failed, infeasible, or cancelled
    ├── SearchTimeout        the search did not end within the caller's time; it goes on in the service
    └── InvalidAnswer        an answer that is not what the service promises

After any of them the client stays usable.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from types import TracebackType
from typing import Any, Self

import httpx
from zbv_solver.channels import Channel, ChannelKind, Transfer
from zbv_solver.errors import InvalidInput, Issue
from zbv_solver.orders import Action
from zbv_solver.plan import Plan, parse_plan

DEFAULT_TIMEOUT = 30.0
DEFAULT_RETRIES = 4
POLL_SECONDS = (0.05, 1.0)
"""First and longest pause between two looks at a search."""
BACK_OFF_SECONDS = (0.1, 5.0)
"""First and longest pause before a repeated request; each is twice the one before."""
_RETRIED_STATUSES = frozenset({429, 502, 503, 504})


class ClientError(Exception):
    """Root of this module's errors."""


class ServiceUnreachable(ClientError):
    """The service gave no answer."""


class ServiceError(ClientError):
    """The service answered with a problem document."""

    def __init__(self, document: Mapping[str, Any]):
        self.document = dict(document)
        self.status = int(document.get("status", 0))
        self.kind = str(document.get("type", ""))
        self.detail = str(document.get("detail", ""))
        super().__init__(f"{document.get('title', 'error')} ({self.status}): {self.detail}")

    @property
    def issues(self) -> tuple[Issue, ...]:
        """The broken rules, where the service names them."""
        entries = self.document.get("errors") or []
        return tuple(Issue(str(entry.get("pointer") or ""), str(entry["detail"])) for entry in entries)


class InvalidRequest(ServiceError):
    """4xx: the request is wrong."""


class NotFound(InvalidRequest):
    """404: there is no such thing."""


class ServiceFailed(ServiceError):
    """5xx: the service failed."""


class SearchEnded(ClientError):
    """A search ended without a plan; ``search`` is its last state."""

    def __init__(self, search: Search):
        self.search = search
        reason = search.error.get("detail") if search.error else None
        super().__init__(f"search {search.id} is {search.state}" + (f": {reason}" if reason else "."))


class SearchTimeout(ClientError):
    """A search did not end in time; ``search`` is its last known state. It goes on in the service."""

    def __init__(self, search: Search, seconds: float):
        self.search = search
        super().__init__(f"search {search.id} is still {search.state} after {seconds:g} s; it goes on.")


class InvalidAnswer(ClientError):
    """An answer that is not what the service promises: most often, it is not this service."""


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


class Client:
    """A connection to a service.

    Parameters
    ----------
    base_url
        Such as ``http://127.0.0.1:8000``.
    timeout
        Seconds for one request.
    retries
        How often a request is repeated that got no answer, or was told to come back. Every call of the
        service can be repeated: equal searches and plans are one.
    transport
        For tests.
    """

    def __init__(
        self,
        base_url: str,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        retries: int = DEFAULT_RETRIES,
        transport: httpx.BaseTransport | None = None,
    ):
        self._retries = retries
        self._http = httpx.Client(base_url=base_url, timeout=timeout, transport=transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def base_url(self) -> str:
        """Address of the service, without a trailing slash."""
        return str(self._http.base_url).rstrip("/")

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def submit(self, problem: Any, options: Mapping[str, Any] | None = None) -> Search:
        """Have a plan searched for a problem document; the same one twice gives the same search.

        Raises
        ------
        InvalidRequest
            When the problem or an option breaks a rule.
        """
        body = {"problem": problem, "options": dict(options or {})}
        return _search(self._json("POST", "/v1/searches", json=body))

    def search(self, search_id: str) -> Search:
        """The state of a search."""
        return _search(self._json("GET", f"/v1/searches/{search_id}"))

    def searches(self, limit: int = 100) -> list[Search]:
        """The newest searches first."""
        answer = self._json("GET", "/v1/searches", params={"limit": limit})
        return [_search(entry) for entry in _key(answer, "searches")]

    def cancel(self, search_id: str) -> Search:
        """Stop a search; it keeps the best plan it found."""
        return _search(self._json("POST", f"/v1/searches/{search_id}/cancel"))

    def wait(
        self,
        search_id: str,
        on_progress: Callable[[Search], None] | None = None,
        timeout: float | None = None,
    ) -> Search:
        """Wait for a search to end with a plan. ``on_progress`` is called with every state seen.

        Raises
        ------
        SearchEnded
            When it ends without a plan.
        SearchTimeout
            When it has not ended after ``timeout`` seconds.
        """
        started = time.monotonic()
        pause, longest = POLL_SECONDS
        while True:
            found = self.search(search_id)
            if on_progress is not None:
                on_progress(found)
            if found.plan_id is not None:
                return found
            if found.is_finished:
                raise SearchEnded(found)
            if timeout is not None and time.monotonic() - started >= timeout:
                raise SearchTimeout(found, timeout)
            time.sleep(pause)
            pause = min(longest, 1.5 * pause)

    def plan_document(self, plan_id: str) -> dict[str, Any]:
        """A plan as its JSON document."""
        document = self._json("GET", f"/v1/plans/{plan_id}")
        if not isinstance(document, dict):
            raise InvalidAnswer(f"found {type(document).__name__} for plan {plan_id}; it must be an object.")
        return document

    def plan(self, plan_id: str) -> Plan:
        """A plan; that it hashes to its id is checked here.

        Raises
        ------
        InvalidAnswer
            When it does not.
        """
        try:
            plan = parse_plan(self.plan_document(plan_id))
        except InvalidInput as error:
            raise InvalidAnswer(f"the service's plan {plan_id} is not one: {error}") from error
        if plan.plan_id != plan_id:
            raise InvalidAnswer(f"asked for plan {plan_id}, and the answer is plan {plan.plan_id}.")
        return plan

    def rank(self, plan_id: str, rank: int) -> RankPlan:
        """One rank's part of a plan."""
        return _rank(self._json("GET", f"/v1/plans/{plan_id}/ranks/{rank}"))

    def import_plan(self, document: Mapping[str, Any]) -> str:
        """Store a plan made elsewhere and return its id.

        Raises
        ------
        InvalidRequest
            When the service finds it wrong.
        """
        return str(_key(self._json("POST", "/v1/plans", json=dict(document)), "plan_id"))

    def export(self, plan_id: str, format_name: str) -> str:
        """A plan in another format, as ``zbv export`` writes it."""
        return self._send("GET", f"/v1/plans/{plan_id}/export/{format_name}").text

    def _json(self, method: str, path: str, **arguments: Any) -> Any:
        response = self._send(method, path, **arguments)
        try:
            return response.json()
        except ValueError:
            raise InvalidAnswer(
                f"{response.url} answered {response.status_code} without JSON; is this a zbv service?"
            ) from None

    def _send(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        pause, longest = BACK_OFF_SECONDS
        for attempt in range(self._retries + 1):
            is_last = attempt == self._retries
            try:
                response = self._http.request(method, path, **arguments)
            except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
                raise ServiceUnreachable(
                    f"{self._http.base_url} is no address: {error}. Give one such as http://127.0.0.1:8000."
                ) from error
            except httpx.TransportError as error:
                if is_last:
                    raise ServiceUnreachable(
                        f"no answer from {self._http.base_url}: {error or type(error).__name__}. "
                        f"Is the service running there? (zbv-service serve)"
                    ) from error
                time.sleep(pause)
            else:
                if response.status_code not in _RETRIED_STATUSES or is_last:
                    return _checked(response)
                time.sleep(min(longest, max(pause, _retry_after(response))))
            pause = min(longest, 2 * pause)
        raise ValueError(f"found {self._retries} retries; must be at least 0.")


def _checked(response: httpx.Response) -> httpx.Response:
    if response.is_success:
        return response
    try:
        document = response.json()
    except ValueError:
        document = None
    if not isinstance(document, dict) or "detail" not in document:
        raise InvalidAnswer(
            f"{response.url} answered {response.status_code} without a problem document; "
            f"is this a zbv service?"
        )
    document.setdefault("status", response.status_code)
    if response.status_code == 404:
        raise NotFound(document)
    raise (ServiceFailed if response.status_code >= 500 else InvalidRequest)(document)


def _retry_after(response: httpx.Response) -> float:
    text = response.headers.get("retry-after", "")
    return float(text) if text.isdigit() else 0.0


def _key(answer: Any, key: str) -> Any:
    if not isinstance(answer, dict) or key not in answer:
        raise InvalidAnswer(f"the answer has no {key!r}; is this a zbv service?")
    return answer[key]


_SEARCH_KEYS = (
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


def _search(answer: Any) -> Search:
    names = (
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
    fields = {name: _key(answer, name) for name in names}
    return Search(**fields, created_at=datetime.fromisoformat(_key(answer, "created_at")))


def _rank(answer: Any) -> RankPlan:
    rank = int(_key(answer, "rank"))
    try:
        return RankPlan(
            plan_id=str(_key(answer, "plan_id")),
            rank=rank,
            pp_degree=int(_key(answer, "pp_degree")),
            microbatches=int(_key(answer, "microbatches")),
            placement=str(_key(answer, "placement")),
            chunks=int(_key(answer, "chunks")),
            stages=tuple(_key(answer, "stages")),
            actions=tuple(map(Action.parse, _key(answer, "actions"))),
            peers=tuple(_key(answer, "peers")),
            channels=tuple(_channel(rank, entry) for entry in _key(answer, "channels")),
        )
    except InvalidInput as error:
        raise InvalidAnswer(f"the answer for rank {rank} cannot be read: {error}") from error


def _channel(rank: int, entry: Any) -> Channel:
    peer, kind = int(_key(entry, "peer")), _key(entry, "kind")
    known: dict[str, ChannelKind] = {"activation": "activation", "gradient": "gradient"}
    if kind not in known:
        raise InvalidAnswer(f"found channel kind {kind!r}; must be one of {', '.join(known)}.")
    is_sender = _key(entry, "direction") == "send"
    transfers = tuple(map(Transfer.parse, _key(entry, "transfers")))
    return Channel(rank if is_sender else peer, peer if is_sender else rank, known[kind], transfers)
