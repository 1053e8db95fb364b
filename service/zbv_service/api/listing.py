"""Query parameters of lists, and the redirect of browsers to pages."""

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
_CURSOR = Field(None, max_length=200, description="Taken from the addresses in `next` and `previous`.")
_ANY_STATE = "One of these states; may be repeated."


class PageQuery(BaseModel):
    """A page of a list. Unknown parameters are errors."""

    model_config = ConfigDict(extra="forbid")

    limit: int = Field(100, ge=1, le=LARGEST_PAGE, description="Entries on a page, at most.")
    cursor: str | None = _CURSOR


class ListQuery(PageQuery):
    """A page of a list of searches or plans, with its filters."""

    q: Text | None = Field(None, description="Prefix of the id, or of the id of a search's plan.")
    pp_degree: int | None = Field(None, ge=1, le=MAX_PP_DEGREE)
    microbatches: int | None = Field(None, ge=1, le=MAX_CELLS)
    objective: Objective | None = None
    created_after: Moment | None = Field(None, description="With a time zone offset, such as Z.")
    created_before: Moment | None = Field(None, description="With a time zone offset, such as Z.")


_OTHERWISE = frozenset({"limit", "cursor", "q", "state"})


class SearchListQuery(ListQuery):
    """The filters of a list of searches."""

    state: list[SearchState] = Field([], description=_ANY_STATE)
    placement: PlacementChoice | None = Field(
        None, description="As requested; `auto` lets the planner choose."
    )

    @property
    def filter(self) -> SearchFilter:
        """The filter for the database."""
        shape = self.model_dump(exclude=set(_OTHERWISE))
        return SearchFilter(**shape, text=self.q, states=frozenset(self.state))


class PlanListQuery(ListQuery):
    """The filters of a list of plans."""

    placement: PlacementKind | None = None
    status: Literal["optimal", "feasible"] | None = None

    @property
    def filter(self) -> PlanFilter:
        """The filter for the database."""
        return PlanFilter(**self.model_dump(exclude=set(_OTHERWISE)), text=self.q)


class RunListQuery(PageQuery):
    """The filters of a list of runs."""

    q: Text | None = Field(
        None, description="Prefix of the id of the run, its plan or its search, or a part of the factory."
    )
    state: list[RunState] = Field([], description=_ANY_STATE)
    created_after: Moment | None = Field(None, description="With a time zone offset, such as Z.")
    created_before: Moment | None = Field(None, description="With a time zone offset, such as Z.")

    @property
    def filter(self) -> RunFilter:
        """The filter for the database."""
        return RunFilter(
            states=frozenset(self.state),
            text=self.q,
            created_after=self.created_after,
            created_before=self.created_before,
        )


class AgentListQuery(PageQuery):
    """The filters of a list of agents."""

    limit: int = Field(1000, ge=1, le=MOST_AGENTS, description="Entries on a page, at most.")
    q: Text | None = Field(
        None, description="A part of the name or address, or a prefix of the id of the agent or its run."
    )
    state: list[AgentState] = Field([], description=f"{_ANY_STATE} Default: live and draining.")

    @property
    def filter(self) -> AgentFilter:
        """The filter for the database."""
        return AgentFilter(states=frozenset(self.state) or AGENT_PRESENT, text=self.q)


def page_at(request: Request, path: str) -> Response:
    """Redirect a browser from a resource to its page, keeping the query."""
    root = str(request.scope.get("root_path", "")).rstrip("/")
    query = f"?{request.url.query}" if request.url.query else ""
    return RedirectResponse(f"{root}{path}{query}", 303, {**VARY, "Cache-Control": "no-store"})
