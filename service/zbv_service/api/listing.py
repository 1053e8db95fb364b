"""Lists by pages: query parameters, cursors, and responses."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlencode

from fastapi import Request, Response
from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field
from zbv_solver.problem.layered_problem import PlacementChoice
from zbv_solver.problem.numeric import MAX_CELLS, MAX_PP_DEGREE
from zbv_solver.problem.problem import Objective
from zbv_solver.problem.stages import PlacementKind

from zbv_service.api.negotiation import VARY, root_of, to_page, wants_page
from zbv_service.api.state import state_of
from zbv_service.errors import INVALID_PARAMETER, ApiError
from zbv_service.records.agents import AGENT_PRESENT, AgentFilter, AgentState
from zbv_service.records.plans import PlanFilter
from zbv_service.records.runs import RunFilter, RunState
from zbv_service.records.searches import Page, Position, SearchFilter, SearchState
from zbv_service.records.shared import json_with

LARGEST_PAGE = 1000
MOST_AGENTS = 10_000
_CURSOR = re.compile(
    r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{6})?\+00:00) ([0-9a-z]{1,64})( newer)?", re.ASCII
)
_ANY_STATE = "One of these states; may be repeated."

T = TypeVar("T")


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


class PageQuery(BaseModel):
    """A page of a list. Unknown parameters are errors."""

    model_config = ConfigDict(extra="forbid")

    limit: int = Field(100, ge=1, le=LARGEST_PAGE, description="Entries on a page, at most.")
    cursor: str | None = Field(
        None, max_length=200, description="Taken from the addresses in `next` and `previous`."
    )


class ListQuery(PageQuery):
    """A page of a list of searches or plans, with its filters."""

    q: Text | None = Field(None, description="Prefix of the id, or of the id of a search's plan.")
    pp_degree: int | None = Field(None, ge=1, le=MAX_PP_DEGREE)
    microbatches: int | None = Field(None, ge=1, le=MAX_CELLS)
    objective: Objective | None = None
    created_after: Moment = None
    created_before: Moment = None

    def _filters(self) -> dict[str, Any]:
        return {"text": self.q, **self.model_dump(exclude={"limit", "cursor", "q", "state"})}


class SearchListQuery(ListQuery):
    """The filters of a list of searches."""

    state: list[SearchState] = Field([], description=_ANY_STATE)
    placement: PlacementChoice | None = Field(
        None, description="As requested; `auto` lets the planner choose."
    )

    @property
    def filter(self) -> SearchFilter:
        """The filter for the database."""
        return SearchFilter(**self._filters(), states=frozenset(self.state))


class LayoutListQuery(PageQuery):
    """The filters of a list of searches for layouts."""

    q: Text | None = Field(None, description="Prefix of the id, or of the id of the best layout's plan.")
    state: list[SearchState] = Field([], description=_ANY_STATE)
    created_after: Moment = None
    created_before: Moment = None

    @property
    def filter(self) -> SearchFilter:
        """The filter for the database."""
        return SearchFilter(
            states=frozenset(self.state),
            text=self.q,
            created_after=self.created_after,
            created_before=self.created_before,
        )


class PlanListQuery(ListQuery):
    """The filters of a list of plans."""

    placement: PlacementKind | None = None
    status: Literal["optimal", "feasible"] | None = None

    @property
    def filter(self) -> PlanFilter:
        """The filter for the database."""
        return PlanFilter(**self._filters())


class RunListQuery(PageQuery):
    """The filters of a list of runs."""

    q: Text | None = Field(
        None,
        description="Prefix of the id of the run, its plan or its search, or a part of the factory or of the "
        "script's path.",
    )
    state: list[RunState] = Field([], description=_ANY_STATE)
    created_after: Moment = None
    created_before: Moment = None

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


@dataclass(frozen=True)
class Neighbours:
    """Addresses of the previous and next page, None without such a page.

    As in all bodies, they assume a service at the root of its host.
    """

    next: str | None
    previous: str | None


def position_of(cursor: str | None) -> Position | None:
    """The position of a cursor, None without one; raises :class:`ApiError` 422 if it is invalid."""
    if cursor is None:
        return None
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode()
        found = _CURSOR.fullmatch(text)
        if found is not None:
            return Position(datetime.fromisoformat(found[1]), found[2], found[3] is not None)
    except (binascii.Error, ValueError):
        pass  # invalid like any other text
    detail = f"found {cursor[:60]!r}; it must come from an earlier page. Leave it out to start at the newest."
    raise ApiError(INVALID_PARAMETER, f"cursor: {detail}", [{"parameter": "cursor", "detail": detail}])


def neighbours(request: Request, page: Page[Any]) -> Neighbours:
    """The addresses of the pages before and after the one that answers a request."""
    query = [
        (name, value) for name, value in request.query_params.multi_items() if name != "cursor" and value
    ]
    path = request.scope["path"].removeprefix(root_of(request))

    def address(position: Position | None) -> str | None:
        if position is None:
            return None
        text = f"{position.created_at.isoformat()} {position.id}{' newer' if position.is_newer else ''}"
        cursor = base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")
        return f"{path}?{urlencode([*query, ('cursor', cursor)])}"

    return Neighbours(address(page.next), address(page.previous))


async def list_response(
    request: Request,
    query: PageQuery,
    load: Callable[[int, Position | None], Awaitable[Page[T]]],
    name: str,
    write: Callable[[T], bytes],
) -> Response:
    """One page of a list, with its neighbours in the header ``Link`` (RFC 8288).

    Parameters
    ----------
    load
        Reads at most so many entries from a position on.
    name, write
        The member of the document that has the entries, and the JSON of an entry. Entries are written one by
        one, in a thread: pydantic would keep the interpreter while it writes the whole list.
    """
    if wants_page(request):
        return to_page(request)
    computations = state_of(request).computations
    async with computations.listing(query.limit):
        page = await load(query.limit, position_of(query.cursor))
    around = neighbours(request, page)
    headers = {**VARY, "Cache-Control": "no-store"}
    links = [
        f'<{root_of(request)}{address}>; rel="{name}"'
        for address, name in ((around.previous, "prev"), (around.next, "next"))
        if address is not None
    ]
    if links:
        headers["Link"] = ", ".join(links)
    # The thread gets the context of the request, because errors in the list contain its root path.
    document = {name: None, **asdict(around)}
    text = await computations.write(
        copy_context().run, lambda: json_with(document, **{name: [*map(write, page.items)]})
    )
    return Response(text, headers=headers, media_type="application/json")
