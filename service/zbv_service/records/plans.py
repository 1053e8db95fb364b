"""Plans: what the database stores of them, what lists send, and what searches of them have in common."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from pydantic import BaseModel
from zbv_solver.problem.problem import Objective

from zbv_service.records.shared import NEXT, Record


class PlanSummaryDocument(Record):
    """A stored plan without its actions."""

    plan_id: str
    pp_degree: int
    microbatches: int
    placement: str
    objective: Objective
    value: float
    """Of the objective, in the problem's time unit."""
    lower_bound: float
    gap: float | None
    status: Literal["optimal", "feasible"]
    bubble_rate: float
    method: str
    time_unit: str | None
    created_at: datetime
    name: str | None = None
    """That of the newest search that has a name and found this plan."""


class PlanList(BaseModel):
    """A page of plans, newest first."""

    plans: list[PlanSummaryDocument]
    next: str | None = NEXT


@dataclass(frozen=True)
class Refusal:
    """A stored incumbent does not fit its problem, so the search started without it."""

    digest: str
    """SHA-256 of the packed incumbent, in hexadecimal."""
    reason: str
    """The rule that it breaks."""


@dataclass(frozen=True)
class NewPlan:
    """A verified plan to be stored."""

    summary: PlanSummaryDocument
    document: bytes
    """The whole plan document, packed."""
    problem_key: str
    """Hash of its problem (:func:`zbv_service.documents.problems.problem_key`); plans with equal keys can
    be compared."""
    search_bound: float
    """The lower bound of the search, which for a problem given by layers holds for every cut."""
