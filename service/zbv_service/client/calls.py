"""Paths of the API, and the checks that every answer must pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
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
