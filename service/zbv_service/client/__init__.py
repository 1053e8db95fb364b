"""A thin client of the service. It needs httpx and the plan format, no web framework and no database.

:class:`Client` submits and follows, and :class:`AgentClient` makes the calls of an agent.
:mod:`zbv_service.client.errors` lists the errors. Names are loaded on first use, so that commands can add
their flags without loading httpx.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zbv_service.client.agent import AgentClient, HeartbeatReply, NodeWork, Registration
    from zbv_service.client.answers import Check, Estimate, Event, RankPlan, Run, Search
    from zbv_service.client.client import Client
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

_MODULES = {
    "agent": ("AgentClient", "HeartbeatReply", "NodeWork", "Registration"),
    "answers": ("Check", "Estimate", "Event", "RankPlan", "Run", "Search"),
    "retries": ("Retries",),
    "client": ("Client",),
}
"""Where the names are; all others are in ``errors``."""

__all__ = [
    "AgentClient",
    "AgentGone",
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
    module = next((module for module, names in _MODULES.items() if name in names), "errors")
    return getattr(import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
