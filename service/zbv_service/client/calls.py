"""Every call of the API as data: what is sent, and how its answer is read. Nothing here sends anything.

:class:`zbv_service.client.sync.Client` and :class:`zbv_service.client.asynchronous.AsyncClient` carry them.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import httpx
from zbv_solver import __version__

from zbv_service.client.answers import (
    Check,
    Estimate,
    RankPlan,
    Search,
    SearchPage,
    member,
    read_check,
    read_estimate,
    read_object,
    read_rank,
    read_search,
    read_search_page,
)
from zbv_service.client.errors import (
    InvalidAnswer,
    InvalidRequest,
    NotFound,
    Overloaded,
    ServiceError,
    ServiceFailed,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Call(Generic[T]):
    """A request, which may be sent several times to be done once, and how to read its answer.

    Attributes
    ----------
    read
        Makes the result of a successful answer.
    errors
        Statuses that mean something special here.
    is_immutable
        Whether the answer, once known, stays the same, so that asking whether it is there is enough.
    """

    method: str
    path: str
    read: Callable[[httpx.Response], T]
    json: Any = None
    params: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    content: bytes | None = None
    errors: Mapping[int, type[ServiceError]] = field(default_factory=dict)
    is_immutable: bool = False

    @property
    def request(self) -> dict[str, Any]:
        """The arguments of httpx's ``build_request``."""
        body: dict[str, Any] = {} if self.json is None else {"json": self.json}
        if self.content is not None:
            body = {"content": self.content}
        params = {name: value for name, value in self.params.items() if value is not None}
        # An address that comes from the service has its own query, which empty params would remove.
        query = {"params": params} if params else {}
        return {"method": self.method, "url": self.path, "headers": dict(self.headers), **query, **body}


def submit(problem: Any, options: Mapping[str, Any] | None, key: str | None = None) -> Call[Search]:
    """Have a plan searched; its key makes it one request however often it is sent."""
    body = {"problem": problem, "options": dict(options or {})}
    headers = {"Idempotency-Key": key or uuid.uuid4().hex}
    return Call("POST", "/v1/searches", as_json(read_search), json=body, headers=headers)


def search(search_id: str) -> Call[Search]:
    """The state of a search."""
    return Call("GET", below("searches", search_id), as_json(read_search))


def searches(**params: Any) -> Call[SearchPage]:
    """A page of searches."""
    return Call("GET", "/v1/searches", as_json(read_search_page), params=params)


def next_searches(address: str) -> Call[SearchPage]:
    """The page that the one before leads to."""
    return Call("GET", address, as_json(read_search_page))


def cancel(search_id: str) -> Call[Search]:
    """Stop a search."""
    return Call("POST", below("searches", search_id, "cancel"), as_json(read_search))


def delete(search_id: str) -> Call[None]:
    """Discard a search."""
    return Call("DELETE", below("searches", search_id), lambda _response: None)


def events(search_id: str, last_event_id: str | None) -> Call[None]:
    """The stream of a search's events; it is read line by line, not as a whole."""
    headers = {"Accept": "text/event-stream", "Cache-Control": "no-store"}
    if last_event_id is not None:
        headers["Last-Event-ID"] = last_event_id
    return Call("GET", below("searches", search_id, "events"), lambda _response: None, headers=headers)


def check(
    problem: Any, options: Mapping[str, Any] | None, limit_fraction: float | None, plan: Any
) -> Call[Check]:
    """Whether a search would be accepted, and what a problem's numbers mean."""
    body = {"problem": problem, "options": dict(options or {})}
    if limit_fraction is not None:
        body["limit_fraction"] = limit_fraction
    if plan is not None:
        body["plan"] = plan
    return Call("POST", "/v1/problems/check", as_json(read_check), json=body)


def estimate(problem: Any) -> Call[Estimate]:
    """What a moment's search of a problem reaches; nothing is stored."""
    return Call("POST", "/v1/problems/estimate", as_json(read_estimate), json={"problem": problem})


def compare(problem: Any) -> Call[dict[str, Any]]:
    """Every baseline of a problem; nothing is planned or stored."""
    return Call("POST", "/v1/compare", as_json(read_object), json={"problem": problem})


def plan(plan_id: str) -> Call[dict[str, Any]]:
    """A plan as its document."""
    return Call("GET", below("plans", plan_id), as_json(read_object))


def rank(plan_id: str, number: int) -> Call[RankPlan]:
    """One rank's part of a plan."""
    return Call("GET", below("plans", plan_id, "ranks", str(number)), as_json(read_rank), is_immutable=True)


def import_plan(document: Mapping[str, Any]) -> Call[str]:
    """Store a plan made elsewhere; equal plans are one."""
    return Call(
        "POST", "/v1/plans", as_json(lambda answer: str(member(answer, "plan_id"))), json=dict(document)
    )


def export(plan_id: str, format_name: str) -> Call[str]:
    """A plan in another format."""
    return Call("GET", below("plans", plan_id, "export", format_name), lambda response: response.text)


def sign_in_link() -> Call[str]:
    """A link that signs one browser in, once."""
    return Call("POST", "/v1/sign-in-links", as_json(lambda answer: str(member(answer, "url"))))


def below(*parts: str) -> str:
    """An address below ``/v1``; whatever stands in ids stays one part of the path."""
    # Dots alone would be taken for directories, and removed before they reach the service.
    safe = (quote(part, safe="") if part.strip(".") else part.replace(".", "%2E") for part in parts)
    return "/v1/" + "/".join(safe)


def checked(
    response: httpx.Response, errors: Mapping[int, type[ServiceError]] | None = None
) -> httpx.Response:
    """A successful answer as it is, 304 included; any other as the error that it means."""
    if response.is_success or response.status_code == 304:
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
    document["status"] = response.status_code  # what it says of itself is a copy, and may be anything
    kinds: dict[int, type[ServiceError]] = {404: NotFound, 429: Overloaded, **(errors or {})}
    otherwise = ServiceFailed if response.status_code >= 500 else InvalidRequest
    raise kinds.get(response.status_code, otherwise)(document)


def decoded(response: httpx.Response) -> Any:
    """The JSON of an answer; raises :class:`InvalidAnswer`."""
    try:
        return response.json()
    except ValueError:
        raise InvalidAnswer(
            f"{response.url} answered {response.status_code} without JSON; is this a zbv service?"
        ) from None


def as_json(read: Callable[[Any], T]) -> Callable[[httpx.Response], T]:
    """A reader of answers, from one of their JSON."""
    return lambda response: read(decoded(response))


HEADERS = {"User-Agent": f"zbv-client/{__version__}", "Accept": "application/json"}
"""What every request of a client says of itself."""


def is_stream(response: httpx.Response) -> bool:
    """Whether an answer is a stream of events; 204 says that there are none (left).

    Raises
    ------
    InvalidAnswer
        When it is something else.
    """
    if response.status_code == 204:
        return False
    found = response.headers.get("content-type", "")
    if not found.startswith("text/event-stream"):
        raise InvalidAnswer(
            f"{response.url} answered {found or 'nothing'} where a stream of events should be."
        )
    return True
