"""What can go wrong between a client and the service.

::

    ClientError
    ├── ServiceUnreachable   no answer: connection refused, timed out, cut off
    ├── ServiceError         an answer that is a problem document (RFC 9457)
    │   ├── InvalidRequest   4xx: the request is wrong; asking again changes nothing
    │   │   ├── NotFound     404
    │   │   └── Overloaded   429: too much at once; asking again later helps
    │   └── ServiceFailed    5xx
    ├── SearchEnded          the search ended without a plan: failed, infeasible, or cancelled
    ├── SearchTimeout        the search did not end within the caller's time; it goes on in the service
    └── InvalidAnswer        an answer that is not what the service promises

After any of them the client stays usable.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zbv_solver.errors import Issue

if TYPE_CHECKING:
    from zbv_service.client.answers import Search


class ClientError(Exception):
    """Root of this module's errors."""


class ServiceUnreachable(ClientError):
    """The service gave no answer."""


class ServiceError(ClientError):
    """The service answered with a problem document.

    Attributes
    ----------
    kind
        The document's ``type``.
    request_id
        Names the request in the service's log; None when the answer has none.
    """

    def __init__(self, document: Mapping[str, Any]):
        self.document = dict(document)
        self.status = int(document.get("status", 0))
        self.kind = str(document.get("type", ""))
        self.detail = str(document.get("detail", ""))
        self.request_id: str | None = document.get("request_id")
        super().__init__(f"{document.get('title', 'error')} ({self.status}): {self.detail}")

    @property
    def issues(self) -> tuple[Issue, ...]:
        """The broken rules, where the service names them."""
        entries = self.document.get("errors")
        named = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
        return tuple(Issue(_place(entry), str(entry.get("detail", ""))) for entry in named)


def _place(entry: dict[str, Any]) -> str:
    return str(entry.get("pointer") or entry.get("parameter") or "")


class InvalidRequest(ServiceError):
    """4xx: the request is wrong."""


class NotFound(InvalidRequest):
    """404: there is no such thing."""


class Overloaded(InvalidRequest):
    """429: the service takes no more of the caller's work for now."""


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
