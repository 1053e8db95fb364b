"""Accepting searches, reading and cancelling them. :mod:`zbv_service.searches.runner` runs them."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError
from zbv_solver import __version__
from zbv_solver.errors import InvalidInput
from zbv_solver.problem import Problem
from zbv_solver.schema import canonical_json, issues_of, problem_json, to_problem

from zbv_service.database import SearchTable
from zbv_service.documents import OptionsDocument, SearchRequest
from zbv_service.http.problems import NOT_FOUND, ProblemError
from zbv_service.packing import pack
from zbv_service.records import NewSearch, SearchRecord
from zbv_service.searches.runner import Runner
from zbv_service.settings import Settings


class Searches:
    """The searches of a service."""

    def __init__(self, table: SearchTable, runner: Runner, settings: Settings):
        self._table = table
        self._runner = runner
        self._settings = settings

    async def submit(self, body: Any) -> SearchRecord:
        """Queue the search that a request body asks for, or return the one that already answers it.

        Raises
        ------
        InvalidInput
            When the body breaks a rule; nothing is stored then.
        """
        new = await asyncio.to_thread(new_search, body, self._settings)
        record, is_new = await self._table.add(new)
        if is_new:
            self._runner.wake()
        return record

    async def get(self, search_id: str) -> SearchRecord:
        """A search; raises :class:`ProblemError` 404."""
        return _found(await self._table.get(search_id), search_id)

    async def problem(self, search_id: str) -> bytes:
        """The normalised problem document of a search, packed; raises :class:`ProblemError` 404."""
        packed = await self._table.problem(search_id)
        if packed is None:
            raise ProblemError(NOT_FOUND, f"found no search {search_id}; GET /v1/searches lists them.")
        return packed

    async def newest(self, limit: int) -> list[SearchRecord]:
        """The newest searches first."""
        return await self._table.newest(limit)

    async def cancel(self, search_id: str) -> SearchRecord:
        """Ask a search to stop and keep what it found; one that has ended stays as it is."""
        record = _found(await self._table.request_cancel(search_id), search_id)
        self._runner.cancel(search_id)
        self._runner.wake()
        return record


def new_search(body: Any, settings: Settings) -> NewSearch:
    """The search that a request body asks for; raises :class:`InvalidInput`."""
    problem, options = parse_request(body, settings)
    document, chosen = problem_json(problem), options.model_dump()
    return NewSearch(
        id=uuid.uuid4().hex,
        request_key=request_key(document, chosen),
        problem=pack(document),
        summary=summary_of(problem),
        options=chosen,
        created_at=datetime.now(UTC),
    )


def parse_request(body: Any, settings: Settings) -> tuple[Problem, OptionsDocument]:
    """The problem and options of a request body; raises :class:`InvalidInput`."""
    try:
        request = SearchRequest.model_validate(body)
    except ValidationError as error:
        raise InvalidInput(issues_of(error, body)) from None
    try:
        problem = to_problem(request.problem)
    except InvalidInput as error:
        raise error.below("/problem") from None
    require_size(problem.pp_degree, problem.microbatches, settings.max_cells)
    limit = request.options.time_limit
    if limit is not None and limit > settings.max_time_limit:
        raise InvalidInput.at(
            "/options/time_limit",
            f"found {limit:.15g}; this service takes at most {settings.max_time_limit:.15g} seconds.",
        )
    return problem, request.options


def require_size(pp_degree: int, microbatches: int, max_cells: int) -> None:
    """Raise :class:`InvalidInput` for a problem that is larger than the service accepts."""
    if pp_degree * microbatches > max_cells:
        raise InvalidInput.at(
            "/problem/microbatches",
            f"found {pp_degree} ranks times {microbatches} microbatches; this service takes at most "
            f"{max_cells}. Plan fewer microbatches: the steady state repeats.",
        )


def request_key(problem: dict[str, Any], options: dict[str, Any]) -> str:
    """Hash of what determines an answer: the normalised problem, the options, and the planner's version."""
    asked = {"problem": problem, "options": options, "version": __version__}
    return hashlib.sha256(canonical_json(asked).encode()).hexdigest()


def summary_of(problem: Problem) -> dict[str, Any]:
    """The few numbers of a problem that a list shows."""
    return {
        "pp_degree": problem.pp_degree,
        "microbatches": problem.microbatches,
        "placement": problem.placement.kind,
        "objective": problem.objective,
        "time_unit": problem.units.time,
    }


def _found(record: SearchRecord | None, search_id: str) -> SearchRecord:
    if record is None:
        raise ProblemError(NOT_FOUND, f"found no search {search_id}; GET /v1/searches lists them.")
    return record
