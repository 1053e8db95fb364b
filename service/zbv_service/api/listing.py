"""What lists have in common: how they are asked for, and where browsers go."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

from fastapi import Request, Response
from fastapi.responses import RedirectResponse
from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field
from zbv_solver.problem.layered_problem import PlacementChoice
from zbv_solver.problem.limits import MAX_CELLS, MAX_PP_DEGREE
from zbv_solver.problem.placement import PlacementKind
from zbv_solver.problem.problem import Objective

from zbv_service.api.negotiation import VARY
from zbv_service.records.runs import AGENT_PRESENT, AgentFilter, AgentState, RunFilter, RunState
from zbv_service.records.searches import PlanFilter, SearchFilter, SearchState

LARGEST_PAGE = 1000
MOST_AGENTS = 10_000


def _in_utc(moment: datetime) -> datetime:
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise ValueError("must be a moment of the years 1 to 9999 in UTC") from None


Moment = Annotated[AwareDatetime, AfterValidator(_in_utc)]


Text = Annotated[str, Field(max_length=200, pattern=r"^[^\x00]*$")]
_CURSOR = Field(None, max_length=200, description="As the addresses in next and previous have it.")
_ANY_STATE = "Any of these; may be repeated."


class PageQuery(BaseModel):
    """A page of a list. An unknown parameter is a mistake, and said to be one."""

    model_config = ConfigDict(extra="forbid")

    limit: int = Field(100, ge=1, le=LARGEST_PAGE, description="Entries on a page, at most.")
    cursor: str | None = _CURSOR


class ListQuery(PageQuery):
    """A page of a list of searches or plans, and what it is filtered by."""

    q: Text | None = Field(None, description="How the id begins, or that of a search's plan.")
    pp_degree: int | None = Field(None, ge=1, le=MAX_PP_DEGREE)
    microbatches: int | None = Field(None, ge=1, le=MAX_CELLS)
    objective: Objective | None = None
    created_after: Moment | None = Field(None, description="With an offset, such as Z.")
    created_before: Moment | None = Field(None, description="With an offset, such as Z.")


_OTHERWISE = frozenset({"limit", "cursor", "q", "state"})


class SearchListQuery(ListQuery):
    """Which searches to list."""

    state: list[SearchState] = Field([], description=_ANY_STATE)
    placement: PlacementChoice | None = Field(
        None, description="As it was asked for; auto leaves it to the planner."
    )

    @property
    def filter(self) -> SearchFilter:
        """What it says of searches."""
        shape = self.model_dump(exclude=set(_OTHERWISE))
        return SearchFilter(**shape, text=self.q, states=frozenset(self.state))


class PlanListQuery(ListQuery):
    """Which plans to list."""

    placement: PlacementKind | None = None
    status: Literal["optimal", "feasible"] | None = None

    @property
    def filter(self) -> PlanFilter:
        """What it says of plans."""
        return PlanFilter(**self.model_dump(exclude=set(_OTHERWISE)), text=self.q)


class RunListQuery(PageQuery):
    """Which runs to list."""

    q: Text | None = Field(
        None, description="How the id of the run, its plan or its search begins, or a part of the factory."
    )
    state: list[RunState] = Field([], description=_ANY_STATE)
    created_after: Moment | None = Field(None, description="With an offset, such as Z.")
    created_before: Moment | None = Field(None, description="With an offset, such as Z.")

    @property
    def filter(self) -> RunFilter:
        """What it says of runs."""
        return RunFilter(
            states=frozenset(self.state),
            text=self.q,
            created_after=self.created_after,
            created_before=self.created_before,
        )


class AgentListQuery(PageQuery):
    """Which agents to list."""

    limit: int = Field(1000, ge=1, le=MOST_AGENTS, description="Entries on a page, at most.")
    q: Text | None = Field(
        None, description="A part of the name or address, or how the id of the agent or its run begins."
    )
    state: list[AgentState] = Field([], description=f"{_ANY_STATE} Without: live and draining.")

    @property
    def filter(self) -> AgentFilter:
        """What it says of agents."""
        return AgentFilter(states=frozenset(self.state) or AGENT_PRESENT, text=self.q)


def page_at(request: Request, path: str) -> Response:
    """Send a browser from a resource to its page, with what the address asks of it."""
    root = str(request.scope.get("root_path", "")).rstrip("/")
    query = f"?{request.url.query}" if request.url.query else ""
    return RedirectResponse(f"{root}{path}{query}", 303, {**VARY, "Cache-Control": "no-store"})
