"""A thin client of the service: needs httpx and the plan format, no web framework and no database.

:class:`Client` blocks, :class:`AsyncClient` is for asyncio; they share everything but the waiting.
:mod:`zbv_service.client.errors` draws the errors.
"""

from zbv_service.client.answers import Check, Estimate, RankPlan, Search, SearchEvent
from zbv_service.client.asynchronous import AsyncClient
from zbv_service.client.errors import (
    ClientError,
    InvalidAnswer,
    InvalidRequest,
    NotFound,
    Overloaded,
    SearchEnded,
    SearchTimeout,
    ServiceError,
    ServiceFailed,
    ServiceUnreachable,
)
from zbv_service.client.retries import Retries
from zbv_service.client.sync import Client

__all__ = [
    "AsyncClient",
    "Check",
    "Client",
    "ClientError",
    "Estimate",
    "InvalidAnswer",
    "InvalidRequest",
    "NotFound",
    "Overloaded",
    "RankPlan",
    "Retries",
    "Search",
    "SearchEnded",
    "SearchEvent",
    "SearchTimeout",
    "ServiceError",
    "ServiceFailed",
    "ServiceUnreachable",
]
