"""A thin client of the service. It needs httpx and the plan format, no web framework and no database.

:class:`Client` blocks, :class:`AsyncClient` is for asyncio, and :class:`AgentClient` makes the calls of an
agent. :mod:`zbv_service.client.errors` lists the errors. Names are loaded on first use, so that commands can
add their flags without loading httpx.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zbv_service.client.agent import AgentClient, HeartbeatReply, NodeWork, Registration
    from zbv_service.client.answers import Check, Estimate, Event, RankPlan, Run, Search
    from zbv_service.client.asynchronous.client import AsyncClient
    from zbv_service.client.errors import (
        AgentGone,
        ClientError,
        InvalidAnswer,
        InvalidRequest,
        NotFound,
        Overloaded,
        RunTimeout,
        SearchEnded,
        SearchTimeout,
        ServiceError,
        ServiceFailed,
        ServiceUnreachable,
    )
    from zbv_service.client.retries import Retries
    from zbv_service.client.synchronous.client import Client

_MODULES = {
    "AgentClient": "agent",
    "HeartbeatReply": "agent",
    "NodeWork": "agent",
    "Registration": "agent",
    "Check": "answers",
    "Estimate": "answers",
    "Event": "answers",
    "RankPlan": "answers",
    "Run": "answers",
    "Search": "answers",
    "AsyncClient": "asynchronous.client",
    "Retries": "retries",
    "Client": "synchronous.client",
}

__all__ = [
    "AgentClient",
    "AgentGone",
    "AsyncClient",
    "Check",
    "Client",
    "ClientError",
    "Estimate",
    "Event",
    "HeartbeatReply",
    "InvalidAnswer",
    "InvalidRequest",
    "NodeWork",
    "NotFound",
    "Overloaded",
    "RankPlan",
    "Registration",
    "Retries",
    "Run",
    "RunTimeout",
    "Search",
    "SearchEnded",
    "SearchTimeout",
    "ServiceError",
    "ServiceFailed",
    "ServiceUnreachable",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
