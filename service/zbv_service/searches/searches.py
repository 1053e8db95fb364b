"""Accepts, reads and cancels searches for plans and layouts. :mod:`zbv_service.searches.runner` runs them."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import uuid
from abc import ABC, abstractmethod
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar, cast

from zbv_solver import __version__
from zbv_solver.documents.files import canonical_json
from zbv_solver.errors import InvalidInput
from zbv_solver.problem.jitter import check_quantile, parse_jitter
from zbv_solver.problem.reading import parse_any_problem
from zbv_solver.search.options import EFFORTS, Effort

from zbv_service.compute.computations import Computations
from zbv_service.database import SearchInUse, SearchTable, TooManySearches
from zbv_service.documents.layouts import LayoutRequest, layouts_summary, read_layouts
from zbv_service.documents.packing import pack, unpack, unpack_text
from zbv_service.documents.parsing import parse_body, parse_json
from zbv_service.documents.problems import (
    Question,
    QuestionDocument,
    question_json,
    read_question,
    summary_of,
)
from zbv_service.errors import (
    NOT_FOUND,
    SEARCH_IN_USE,
    TOO_MANY_SEARCHES,
    ApiError,
)
from zbv_service.records.lists import LayoutListQuery, Page, Position, SearchListQuery
from zbv_service.records.searches import (
    LayoutSearchDocument,
    NewSearch,
    SearchDocument,
    SearchKind,
    SearchRecord,
)
from zbv_service.records.shared import OptionsDocument, RequestDocument
from zbv_service.searches.runner import Runner
from zbv_service.settings import Settings

RETRY_SECONDS = 5
"""Retry-After in seconds for a caller at its limit of searches."""
_ID = re.compile(r"[0-9a-f]{32}")

logger = logging.getLogger(__name__)


class SearchRequest(RequestDocument):
    """A problem to search a plan for."""

    problem: QuestionDocument
    options: OptionsDocument = OptionsDocument()


S = TypeVar("S", bound=SearchRecord)


class SearchesOfKind(ABC, Generic[S]):
    """The searches of a service of one kind; others are not found or listed."""

    document: type[S]
    kind: ClassVar[SearchKind]
    address: ClassVar[str]

    def __init__(self, table: SearchTable, runner: Runner, settings: Settings, computations: Computations):
        self._table = table
        self._computations = computations
        self._runner = runner
        self._settings = settings

    async def submit(
        self,
        body: Any,
        *,
        caller: str | None = None,
        most: int | None = None,
    ) -> S:
        """Queue the search of a request body, or return the search that already answers it.

        Parameters
        ----------
        body
            JSON text, or the decoded document.
        caller
            The name of the caller.
        most
            The caller's limit of unfinished searches; None for no limit.

        Raises
        ------
        InvalidInput
            The body breaks a rule; nothing was stored.
        ApiError
            429: the caller has too many searches. 503: too many bodies wait to be read.
        """
        return await self.submit_read(await self._read(body), caller=caller, most=most)

    @abstractmethod
    async def _read(self, body: Any) -> NewSearch:
        """The search of a body."""

    async def submit_read(self, new: NewSearch, *, caller: str | None, most: int | None) -> S:
        """As :meth:`submit` for a search that :func:`new_search` has made."""
        return await self._submit(replace(new, created_by=caller), most)

    async def _submit(self, new: NewSearch, most: int | None, for_run: bool = False) -> S:
        try:
            record, is_new = await self._table.add(new, most=most, for_run=for_run)
        except TooManySearches:
            raise ApiError(
                TOO_MANY_SEARCHES,
                f"{most} searches of {f'token {new.created_by}' if new.created_by else 'this service'} are "
                f"queued or running, which is the limit. Wait for some to end, or cancel some.",
                headers={"Retry-After": str(RETRY_SECONDS)},
            ) from None
        if is_new:
            # This line has the ids of both the request and the search, which links their logs.
            logger.info("search %s is queued", record.id, extra={"search_id": record.id})
            self._runner.wake()
        return self._found(record, record.id)

    async def get(self, search_id: str) -> S:
        """A search; raises :class:`ApiError` 404."""
        return self._found(await self._table.get(self._known(search_id)), search_id)

    async def find(self, search_id: str) -> SearchRecord | None:
        """A search of any kind, None if it was removed."""
        return await self._table.get(search_id)

    async def placed(self, record: S) -> S:
        """The search with its place in the queue, if it is queued."""
        if record.state != "queued":
            return record
        return record.model_copy(update={"queued_before": await self._table.queued_before(record)})

    async def asked(self, search_id: str) -> tuple[S, bytes]:
        """A search and its packed problem, see :func:`parse_packed`; raises :class:`ApiError` 404."""
        record, packed = await self.get(search_id), await self._table.problem(search_id)
        if packed is None:
            raise self._not_found(search_id)
        return record, packed

    async def problem(self, search_id: str) -> bytes | None:
        """The packed problem document of a search, None if it was removed."""
        return await self._table.problem(search_id)

    async def problem_text(self, search_id: str) -> bytes:
        """The normalised problem document of a search, as JSON text; raises :class:`ApiError` 404."""
        _, packed = await self.asked(search_id)
        return await asyncio.to_thread(unpack_text, packed)

    async def page(self, wanted: SearchListQuery | LayoutListQuery, after: Position | None = None) -> Page[S]:
        """One page of searches, newest first, starting at a position."""
        return cast("Page[S]", await self._table.page(wanted, after))

    async def cancel(self, search_id: str) -> S:
        """Ask a search to stop and keep its best plan; an ended search does not change."""
        await self.get(search_id)
        record = self._found(await self._table.request_cancel(search_id), search_id)
        self._runner.cancel(search_id)
        self._runner.wake()
        return record

    async def discard(self, search_id: str) -> None:
        """Stop and remove a search; its plan stays.

        Raises
        ------
        ApiError
            404: there is no such search. 409: a run waits for it.
        """
        await self.get(search_id)
        try:
            if not await self._table.discard(search_id):
                raise self._not_found(search_id)
        except SearchInUse as error:
            raise ApiError(
                SEARCH_IN_USE, f"run {error.run_id} waits for search {search_id}; cancel the run first."
            ) from None
        self._runner.cancel(search_id)

    def _known(self, search_id: str) -> str:
        """The id, if it has the form of one; databases reject some texts.

        Raises :class:`ApiError` 404.
        """
        if not _ID.fullmatch(search_id):
            raise self._not_found(search_id)
        return search_id

    def _found(self, record: SearchRecord | None, search_id: str) -> S:
        if not isinstance(record, self.document):
            raise self._not_found(search_id)
        return record

    def _not_found(self, search_id: str) -> ApiError:
        return ApiError(NOT_FOUND, f"found no search {search_id[:64]!r}; GET {self.address} lists them.")


class Searches(SearchesOfKind[SearchDocument]):
    """The searches of a service for plans."""

    document = SearchDocument
    kind = "plan"
    address = "/v1/searches"

    async def _read(self, body: Any) -> NewSearch:
        is_text = isinstance(body, bytes | bytearray)
        compute = self._computations.of_body if is_text else self._computations.of_document
        return await compute(partial(new_search, self._settings), body)

    async def submit_for_run(self, new: NewSearch, *, caller: str | None, most: int | None) -> SearchDocument:
        """Queue the search that a run waits for, or return the search that already answers it.

        The run releases it with :meth:`cancel_unwanted`. Raises the errors of :meth:`submit`.
        """
        mine = replace(new, id=uuid.uuid4().hex, created_by=caller)  # the run may need another one
        return await self._submit(mine, most, for_run=True)

    async def cancel_unwanted(self, search_id: str) -> None:
        """Cancel a search after the run that waited for it was cancelled, unless others want its plan."""
        if await self._table.cancel_unwanted(search_id):
            self._runner.cancel(search_id)
            self._runner.wake()


def parse_packed(packed: bytes) -> Question:
    """The problem of a packed document."""
    return parse_any_problem(unpack(packed))


def new_search(settings: Settings, body: Any) -> NewSearch:
    """The search of a decoded request body; raises :class:`InvalidInput`."""
    question, options = parse_request(body, settings)
    document, chosen = question_json(question), options.stored()
    key, jitter = request_key(document, chosen), chosen.pop("jitter", None)
    return NewSearch(
        id=uuid.uuid4().hex,
        request_key=key,
        problem=pack(document),
        summary=summary_of(question),
        options=chosen,
        jitter=None if jitter is None else pack(jitter),
    )


def parse_request(body: Any, settings: Settings) -> tuple[Question, OptionsDocument]:
    """The problem and options of a request body; raises :class:`InvalidInput`."""
    request = parse_body(SearchRequest, body)
    question = read_question(request.problem, settings.max_cells)
    require_allowed(request.options.effort, request.options.time_limit, settings)
    try:
        _require_jitter(request.options, question.pp_degree)
    except InvalidInput as error:
        raise error.below("/options") from None
    return question, request.options


def require_allowed(effort: Effort | None, time_limit: float | None, settings: Settings) -> None:
    """Raise :class:`InvalidInput` for options beyond the limits of the service."""
    if time_limit is not None and time_limit > settings.max_time_limit:
        raise InvalidInput.at(
            "/options/time_limit",
            f"found {time_limit:.15g}; this service takes at most {settings.max_time_limit:.15g} seconds.",
        )
    highest = settings.max_effort
    if effort is not None and EFFORTS.index(effort) > EFFORTS.index(highest):
        raise InvalidInput.at("/options/effort", f"found {effort}; this service takes at most {highest}.")


def _require_jitter(options: OptionsDocument, pp_degree: int) -> None:
    """Raise :class:`InvalidInput` when the jitter or the quantile is wrong."""
    if options.jitter is None:
        check_quantile(options.quantile, None)
        return
    try:
        parse_jitter(options.jitter).require_ranks(pp_degree)
    except InvalidInput as error:
        raise error.below("/jitter") from None


def request_key(problem: dict[str, Any], options: dict[str, Any]) -> str:
    """Hash of the normalised problem, the options and the planner's version, which determine the result."""
    asked = {"problem": problem, "options": options, "version": __version__}
    return hashlib.sha256(canonical_json(asked).encode()).hexdigest()


class LayoutSearches(SearchesOfKind[LayoutSearchDocument]):
    """The searches of a service for layouts."""

    document = LayoutSearchDocument
    kind = "layouts"
    address = "/v1/layouts"

    async def _read(self, body: Any) -> NewSearch:
        # Enumerating the layouts of a large cluster takes seconds.
        return await self._computations.run(partial(read_layout_search, self._settings), body)

    async def answer(self, record: LayoutSearchDocument) -> bytes | None:
        """The packed answer of a search; None before its end."""
        return await self._table.answer(record.id)

    async def text(self, record: LayoutSearchDocument) -> bytes:
        """The document of a search with its answer, as JSON."""
        packed, placed = await self.answer(record), await self.placed(record)
        return await asyncio.to_thread(placed.text, packed)


def read_layout_search(settings: Settings, body: Any) -> NewSearch:
    """The search of a body; runs in another process.

    Parameters
    ----------
    body
        JSON text, or the decoded document.

    Raises
    ------
    InvalidInput
        The body breaks a rule, or no layout divides the cluster.
    ApiError
        400: the body is not JSON.
    """
    document = parse_json(body) if isinstance(body, bytes | bytearray) else body
    asked = parse_body(LayoutRequest, document)
    require_allowed(asked.options.effort, asked.options.time_limit, settings)
    summary = layouts_summary(asked, read_layouts(asked))
    normal, options = asked.model_dump(mode="json"), asked.options.model_dump()
    key = canonical_json({"layouts": normal, "version": __version__})
    return NewSearch(
        id=uuid.uuid4().hex,
        request_key=hashlib.sha256(key.encode()).hexdigest(),
        problem=pack(normal),
        summary=summary,
        options=options,
        kind="layouts",
    )
