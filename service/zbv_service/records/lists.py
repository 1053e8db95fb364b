"""Lists by pages: what a request asks for, which is what the database looks for, and what it finds."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Generic, Literal, TypeVar

from pydantic import AfterValidator, AwareDatetime, Field
from zbv_solver.problem.layered_problem import PlacementChoice
from zbv_solver.problem.numeric import MAX_CELLS, MAX_PP_DEGREE
from zbv_solver.problem.problem import Objective
from zbv_solver.problem.stages import PlacementKind

from zbv_service.records.agents import AgentState
from zbv_service.records.runs import RunState
from zbv_service.records.searches import SearchKind, SearchState
from zbv_service.records.shared import RequestDocument

LARGEST_PAGE = 1000
MOST_AGENTS = 10_000
_ANY_STATE = "One of these states; may be repeated."


def _in_utc(moment: datetime) -> datetime:
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise ValueError("must be a moment of the years 1 to 9999 in UTC") from None


Moment = Annotated[
    Annotated[AwareDatetime, AfterValidator(_in_utc)] | None,
    Field(description="With a time zone offset, such as Z."),
]
Text = Annotated[str, Field(max_length=200, pattern=r"^[^\x00]*$")]


class PageQuery(RequestDocument):
    """A page of a list. Unknown parameters are errors."""

    limit: int = Field(100, ge=1, le=LARGEST_PAGE, description="Entries on a page, at most.")
    cursor: str | None = Field(None, max_length=200, description="Taken from the address in `next`.")


class TimedQuery(PageQuery):
    """A page of a list that can be restricted by the time of creation."""

    created_after: Moment = None
    created_before: Moment = None


class ShapeQuery(TimedQuery):
    """A page of a list of searches or plans, with its filters."""

    q: Text | None = Field(
        None, description="Prefix of the id, or of the id of a search's plan, or a part of the name."
    )
    pp_degree: int | None = Field(None, ge=1, le=MAX_PP_DEGREE)
    microbatches: int | None = Field(None, ge=1, le=MAX_CELLS)
    objective: Objective | None = None


class SearchListQuery(ShapeQuery):
    """The filters of a list of searches. Those of a problem exclude searches for layouts."""

    kind: SearchKind | None = Field(None, description="Searches for plans, or for layouts; default: both.")
    state: list[SearchState] = Field([], description=_ANY_STATE)
    placement: PlacementChoice | None = Field(
        None, description="As requested; `auto` lets the planner choose."
    )


class PlanListQuery(ShapeQuery):
    """The filters of a list of plans."""

    placement: PlacementKind | None = None
    status: Literal["optimal", "feasible"] | None = None


class RunListQuery(TimedQuery):
    """The filters of a list of runs."""

    q: Text | None = Field(
        None,
        description="Prefix of the id of the run, its plan or its search, or a part of its name, its factory "
        "or its script's path.",
    )
    state: list[RunState] = Field([], description=_ANY_STATE)


class AgentListQuery(PageQuery):
    """The filters of a list of agents."""

    limit: int = Field(1000, ge=1, le=MOST_AGENTS, description="Entries on a page, at most.")
    q: Text | None = Field(
        None, description="A part of the name or address, or a prefix of the id of the agent or its run."
    )
    state: list[AgentState] = Field([], description=f"{_ANY_STATE} Default: live and draining.")


T = TypeVar("T")


@dataclass(frozen=True)
class Position:
    """A position in a list sorted by creation, newest first; ``id`` breaks ties."""

    created_at: datetime
    id: str


@dataclass(frozen=True)
class Page(Generic[T]):
    """A part of a list, newest first."""

    items: tuple[T, ...]
    next: Position | None
    """The position of the last item, if there are older ones."""
