"""Errors of the client.

::

    ClientError
    ├── ServiceUnreachable   no answer: connection refused, timed out, cut off
    ├── ServiceError         an answer that is an error document (RFC 9457)
    │   ├── InvalidRequest   4xx: the request is wrong; repeating it changes nothing
    │   │   ├── NotFound     404
    │   │   ├── Overloaded   429: too many requests; repeating it later helps
    │   │   └── AgentGone    404 or 410 for an agent: it must register again
    │   └── ServiceFailed    5xx
    ├── SearchEnded          the search ended without a plan: failed, infeasible, or cancelled
    ├── SearchTimeout        the search did not end in time; it continues in the service
    ├── RunTimeout           the run did not end in time; it continues
    └── InvalidAnswer        an answer that breaks the API; most likely another program answered

The client stays usable after each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zbv_solver.errors import Issue

if TYPE_CHECKING:
    from zbv_service.client.answers import Run, Search


class ClientError(Exception):
    """Base class of the client's errors."""


class ServiceUnreachable(ClientError):
    """The service did not answer."""


class ServiceError(ClientError):
    """The service answered with an error document.

    Attributes
    ----------
    document
        The error document.
    kind
        Its ``type``.
    request_id
        The request's id in the service's log; None when the document has none.
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
        """The broken rules, when the document lists them."""
        entries = self.document.get("errors")
        named = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
        return tuple(Issue(_place(entry), str(entry.get("detail", ""))) for entry in named)


def _place(entry: dict[str, Any]) -> str:
    return str(entry.get("pointer") or entry.get("parameter") or "")


class InvalidRequest(ServiceError):
    """4xx: the request is wrong."""


class NotFound(InvalidRequest):
    """404: not found."""


class Overloaded(InvalidRequest):
    """429: the service accepts no more work from this caller for now."""


class AgentGone(InvalidRequest):
    """The service does not know the agent, has declared it lost, or another token owns it.

    The agent's part of a run has ended; register again under a new id.
    """


class ServiceFailed(ServiceError):
    """5xx: the service failed."""


class SearchEnded(ClientError):
    """A search ended without a plan; ``search`` is its last state."""

    def __init__(self, search: Search):
        self.search = search
        reason = search.error.get("detail") if search.error else None
        super().__init__(f"search {search.id} is {search.state}" + (f": {reason}" if reason else "."))


class SearchTimeout(ClientError):
    """A search did not end in time and continues; ``search`` is its last known state."""

    def __init__(self, search: Search, seconds: float):
        self.search = search
        super().__init__(
            f"search {search.id} is still {search.state} after {seconds:g} s; it continues in the service."
        )


class RunTimeout(ClientError):
    """A run did not end in time and continues; ``run`` is its last known state."""

    def __init__(self, run: Run, seconds: float):
        self.run = run
        super().__init__(f"run {run.id} is still {run.state} after {seconds:g} s; it continues.")


class InvalidAnswer(ClientError):
    """An answer breaks the API; most likely another program answered."""
