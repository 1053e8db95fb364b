"""The database: tables, migrations, and nearly all code that speaks SQL.

Callers pass and receive the frozen records of :mod:`zbv_service.records`. The tables of tokens and quotas are
used in :mod:`zbv_service.security`.
"""

from __future__ import annotations

from zbv_service.database.agents import AgentTable, ListenerTable
from zbv_service.database.engine import Database, DatabaseAway, DatabaseUnusable
from zbv_service.database.events import RunEventTable, SearchEventTable
from zbv_service.database.heartbeats import HeartbeatTable
from zbv_service.database.plans import PlanTable
from zbv_service.database.retention import Keep, Retention
from zbv_service.database.run_parts import PartTable
from zbv_service.database.run_plans import RunPlanTable
from zbv_service.database.runs import AgentsTaken, KeyReused, RunTable, SearchGone
from zbv_service.database.searches import SearchInUse, SearchTable, TooManySearches

__all__ = [
    "AgentTable",
    "AgentsTaken",
    "Database",
    "DatabaseAway",
    "DatabaseUnusable",
    "HeartbeatTable",
    "Keep",
    "KeyReused",
    "ListenerTable",
    "PartTable",
    "PlanTable",
    "Retention",
    "RunEventTable",
    "RunPlanTable",
    "RunTable",
    "SearchEventTable",
    "SearchGone",
    "SearchInUse",
    "SearchTable",
    "TooManySearches",
]
