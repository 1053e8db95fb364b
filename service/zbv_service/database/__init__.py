"""The database: tables, migrations, and the only code that speaks SQL.

Nothing outside sees a table or a session. What leaves are the frozen records of
:mod:`zbv_service.records` and :mod:`zbv_service.runs.records`.
"""

from __future__ import annotations

from zbv_service.database.agents import AgentTable
from zbv_service.database.engine import Database, DatabaseUnusable
from zbv_service.database.plans import PlanTable
from zbv_service.database.run_parts import PartTable
from zbv_service.database.run_plans import RunPlanTable
from zbv_service.database.runs import AgentsTaken, RunTable
from zbv_service.database.searches import SearchTable
from zbv_service.records import (
    ANSWERED,
    FINISHED,
    Claim,
    NewPlan,
    NewSearch,
    PlanSummary,
    SearchRecord,
    SearchState,
    Update,
)

__all__ = [
    "ANSWERED",
    "FINISHED",
    "AgentTable",
    "AgentsTaken",
    "Claim",
    "Database",
    "DatabaseUnusable",
    "NewPlan",
    "NewSearch",
    "PartTable",
    "PlanSummary",
    "PlanTable",
    "RunPlanTable",
    "RunTable",
    "SearchRecord",
    "SearchState",
    "SearchTable",
    "Update",
]
