"""Requests of the API as data, and the checks that every answer must pass. This module sends nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import httpx
from zbv_solver import __version__

from zbv_service.client.errors import (
    InvalidAnswer,
    InvalidRequest,
    NotFound,
    Overloaded,
    ServiceError,
    ServiceFailed,
)

T = TypeVar("T")

HEADERS = {"User-Agent": f"zbv-client/{__version__}", "Accept": "application/json"}
"""Headers that a client sends with every request."""


@dataclass(frozen=True)
class Call(Generic[T]):
    """A request and how to read its answer. The client may send it several times."""

    method: str
    path: str
    read: Callable[[httpx.Response], T]
    """Converts a successful response into the result."""
    json: Any = None
    params: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    content: bytes | None = None

    @property
    def request(self) -> dict[str, Any]:
        """The arguments of httpx's ``build_request``."""
        body: dict[str, Any] = {} if self.json is None else {"json": self.json}
        if self.content is not None:
            body = {"content": self.content}
        params = {name: value for name, value in self.params.items() if value is not None}
        # A link to the next page has its own query, which empty params would remove.
        query = {"params": params} if params else {}
        return {"method": self.method, "url": self.path, "headers": dict(self.headers), **query, **body}


def below(*parts: str) -> str:
    """Join path segments below ``/v1``; every character of an id stays inside its segment."""
    # httpx would resolve a segment of dots as a directory.
    safe = (quote(part, safe="") if part.strip(".") else part.replace(".", "%2E") for part in parts)
    return "/v1/" + "/".join(safe)


def checked(response: httpx.Response) -> httpx.Response:
    """Return a successful response.

    Raises
    ------
    ServiceError
        When the response is an error document.
    InvalidAnswer
        When it is an error without an error document.
    """
    if response.is_success:
        return response
    try:
        document = response.json()
    except ValueError:
        document = None
    if not isinstance(document, dict) or "detail" not in document:
        raise InvalidAnswer(
            f"{response.url} answered {response.status_code} without an error document; "
            f"is this a zbv service?"
        )
    document["status"] = response.status_code  # the document's own copy may be anything
    kinds: dict[int, type[ServiceError]] = {404: NotFound, 429: Overloaded}
    otherwise = ServiceFailed if response.status_code >= 500 else InvalidRequest
    raise kinds.get(response.status_code, otherwise)(document)


def decoded(response: httpx.Response) -> Any:
    """The JSON of a response; raises :class:`InvalidAnswer`."""
    try:
        return response.json()
    except ValueError:
        raise InvalidAnswer(
            f"{response.url} answered {response.status_code} without JSON; is this a zbv service?"
        ) from None


def as_json(read: Callable[[Any], T]) -> Callable[[httpx.Response], T]:
    """A reader of responses that decodes JSON and passes it to ``read``."""
    return lambda response: read(decoded(response))


def as_text(response: httpx.Response) -> str:
    """A reader of responses that returns their text."""
    return response.text


def as_nothing(_response: httpx.Response) -> None:
    """A reader for responses without a useful body."""
