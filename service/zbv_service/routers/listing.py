"""What the lists of searches and of plans have in common: how they are asked for, and where browsers go."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

from fastapi import Request, Response
from fastapi.responses import RedirectResponse
from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field
from zbv_solver.placement import PlacementKind
from zbv_solver.problem import MAX_CELLS, MAX_PP_DEGREE, Objective

from zbv_service.http.negotiation import VARY
from zbv_service.records import PlanFilter, SearchFilter, SearchState

LARGEST_PAGE = 1000


def _in_utc(moment: datetime) -> datetime:
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise ValueError("must be a moment of the years 1 to 9999 in UTC") from None


Moment = Annotated[AwareDatetime, AfterValidator(_in_utc)]


class ListQuery(BaseModel):
    """A page of a list, and what it is filtered by. An unknown parameter is a mistake, and said to be one."""

    model_config = ConfigDict(extra="forbid")

    limit: int = Field(100, ge=1, le=LARGEST_PAGE, description="Entries on a page, at most.")
    cursor: str | None = Field(None, max_length=200, description="As the address in next has it.")
    pp_degree: int | None = Field(None, ge=1, le=MAX_PP_DEGREE)
    microbatches: int | None = Field(None, ge=1, le=MAX_CELLS)
    placement: PlacementKind | None = None
    objective: Objective | None = None
    created_after: Moment | None = Field(None, description="With an offset, such as Z.")
    created_before: Moment | None = Field(None, description="With an offset, such as Z.")


_PAGING = frozenset({"limit", "cursor"})


class SearchListQuery(ListQuery):
    """Which searches to list."""

    state: list[SearchState] = Field([], description="Any of these; may be repeated.")

    @property
    def filter(self) -> SearchFilter:
        """What it says of searches."""
        shape = self.model_dump(exclude={*_PAGING, "state"})
        return SearchFilter(**shape, states=frozenset(self.state))


class PlanListQuery(ListQuery):
    """Which plans to list."""

    status: Literal["optimal", "feasible"] | None = None

    @property
    def filter(self) -> PlanFilter:
        """What it says of plans."""
        return PlanFilter(**self.model_dump(exclude=set(_PAGING)))


def page_at(request: Request, path: str) -> Response:
    """Send a browser from a resource to its page."""
    root = str(request.scope.get("root_path", "")).rstrip("/")
    return RedirectResponse(f"{root}{path}", 303, {**VARY, "Cache-Control": "no-store"})
