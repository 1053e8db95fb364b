"""Accepting searches, reading and cancelling them. :mod:`zbv_service.searches.runner` runs them."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import uuid
from dataclasses import replace
from functools import partial
from typing import Any

from zbv_solver import __version__
from zbv_solver.errors import InvalidInput
from zbv_solver.problem.stage_document import canonical_json
from zbv_solver.search.options import EFFORTS

from zbv_service.api.idempotency import NamedRequests, fingerprint_of
from zbv_service.compute.computations import Computations
from zbv_service.database import SearchDiscarded, SearchInUse, SearchTable, TooManySearches
from zbv_service.documents.packing import pack, unpack, unpack_text
from zbv_service.documents.problems import Question, parse_question, question_json, read_question, summary_of
from zbv_service.documents.shared import OptionsDocument, SearchRequest, parse_body
from zbv_service.errors import (
    NOT_FOUND,
    SEARCH_DISCARDED,
    SEARCH_IN_USE,
    TOO_MANY_SEARCHES,
    ProblemError,
)
from zbv_service.records.searches import NamedRequest, NewSearch, Page, Position, SearchFilter, SearchRecord
from zbv_service.searches.runner import Runner
from zbv_service.settings import Settings

RETRY_SECONDS = 5
"""After how long it is worth asking whether a caller may have another search."""
_ID = re.compile(r"[0-9a-f]{32}")

logger = logging.getLogger(__name__)


class Searches:
    """The searches of a service."""

    def __init__(self, table: SearchTable, runner: Runner, settings: Settings, computations: Computations):
        self._table = table
        self._computations = computations
        self._runner = runner
        self._settings = settings
        self._names = NamedRequests("search", settings.idempotency_seconds)

    async def submit(
        self,
        body: Any,
        *,
        key: str | None = None,
        caller: str | None = None,
        most: int | None = None,
    ) -> SearchRecord:
        """Queue the search that a request body asks for, or return the one that already answers it.

        Parameters
        ----------
        body
            JSON text, or what it says.
        key
            Hash of the caller and its name for the request. For ``settings.idempotency_seconds`` the same
            name with the same body is answered with the same search, whatever became of it.
        caller
            Who asks.
        most
            Unfinished searches that the caller may have, None for any number.

        Raises
        ------
        InvalidInput
            When the body breaks a rule; nothing is stored then.
        ProblemError
            409 while a request of the same name is being answered, 422 when it had another body, 410 when its
            search was discarded, 429 when the caller has too many searches, 503 when too many bodies wait to
            be read.
        """
        async with self._names.answering(key) as named:
            new, fingerprint = await self._prepare(body, caller)
            return await self._submit(new, named(fingerprint), most)

    async def submit_for_run(self, new: NewSearch, *, caller: str | None, most: int | None) -> SearchRecord:
        """Queue the search that a run waits for, or return the one that already answers it.

        The run gives it back with :meth:`cancel_unwanted`. Raises as :meth:`submit`.
        """
        mine = replace(new, id=uuid.uuid4().hex, created_by=caller)  # the run may need another one
        return await self._submit(mine, None, most, for_run=True)

    async def _submit(
        self, new: NewSearch, named: NamedRequest | None, most: int | None, for_run: bool = False
    ) -> SearchRecord:
        try:
            record, is_new = await self._table.add(new, named, most=most, for_run=for_run)
        except SearchDiscarded:
            raise ProblemError(
                SEARCH_DISCARDED,
                "The search of this request was discarded. Send the request with a new Idempotency-Key to "
                "search again.",
            ) from None
        except TooManySearches:
            raise ProblemError(
                TOO_MANY_SEARCHES,
                f"{most} searches of {f'token {new.created_by}' if new.created_by else 'this service'} are "
                f"queued or running, as many as may be. Wait for some to end, or cancel some.",
                headers={"Retry-After": str(RETRY_SECONDS)},
            ) from None
        if is_new:
            # The one line with both ids: the request ends here, and the search goes on without it.
            logger.info("search %s is queued", record.id, extra={"search_id": record.id})
            self._runner.wake()
        return record

    async def _prepare(self, body: Any, caller: str | None) -> tuple[NewSearch, str]:
        """The search that a body asks for, and the body's fingerprint."""
        read = partial(read_search, self._settings)
        is_text = isinstance(body, bytes | bytearray)
        new, fingerprint = await (
            self._computations.of_body(read, body) if is_text else self._computations.of_document(read, body)
        )
        return replace(new, created_by=caller), fingerprint

    async def get(self, search_id: str) -> SearchRecord:
        """A search; raises :class:`ProblemError` 404."""
        return _found(await self._table.get(_known(search_id)), search_id)

    async def find(self, search_id: str) -> SearchRecord | None:
        """A search, or None when it is gone."""
        return await self._table.get(search_id)

    async def queued_before(self, record: SearchRecord) -> int | None:
        """How many searches come before one that is queued; None of one that is not."""
        return await self._table.queued_before(record) if record.state == "queued" else None

    async def asked(self, search_id: str) -> tuple[SearchRecord, bytes]:
        """A search and its problem, packed: see :func:`parse_packed`; raises :class:`ProblemError` 404."""
        record, packed = await self.get(search_id), await self._table.problem(search_id)
        if packed is None:
            raise _not_found(search_id)
        return record, packed

    async def problem(self, search_id: str) -> bytes | None:
        """The normalised problem document of a search, packed, or None when it is gone."""
        return await self._table.problem(search_id)

    async def problem_text(self, search_id: str) -> bytes:
        """The normalised problem document of a search, as JSON text; raises :class:`ProblemError` 404."""
        packed = await self._table.problem(_known(search_id))
        if packed is None:
            raise _not_found(search_id)
        return await asyncio.to_thread(unpack_text, packed)

    async def newest(self, limit: int) -> list[SearchRecord]:
        """The newest searches first."""
        return await self._table.newest(limit)

    async def page(self, wanted: SearchFilter, limit: int, after: Position | None) -> Page[SearchRecord]:
        """Some searches, the newest first, from a position on."""
        return await self._table.page(wanted, limit, after)

    async def cancel(self, search_id: str) -> SearchRecord:
        """Ask a search to stop and keep what it found; one that has ended stays as it is."""
        record = _found(await self._table.request_cancel(_known(search_id)), search_id)
        self._runner.cancel(search_id)
        self._runner.wake()
        return record

    async def cancel_unwanted(self, search_id: str) -> None:
        """Cancel a search after a run that waited for it was cancelled, unless others want its plan."""
        if await self._table.cancel_unwanted(search_id):
            self._runner.cancel(search_id)
            self._runner.wake()

    async def discard(self, search_id: str) -> None:
        """Stop a search and forget it; its plan, if it has one, stays.

        Raises
        ------
        ProblemError
            404 when there is none, 409 when a run waits for it.
        """
        try:
            if not await self._table.discard(_known(search_id)):
                raise _not_found(search_id)
        except SearchInUse as error:
            raise ProblemError(
                SEARCH_IN_USE, f"run {error.run_id} waits for search {search_id}; cancel the run first."
            ) from None
        self._runner.cancel(search_id)


def parse_packed(packed: bytes) -> Question:
    """The question of a packed document."""
    return parse_question(unpack(packed))


def read_search(settings: Settings, body: Any) -> tuple[NewSearch, str]:
    """The search that a decoded body asks for, and the body's fingerprint; raises :class:`InvalidInput`."""
    return new_search(body, settings), fingerprint_of(body)


def new_search(body: Any, settings: Settings) -> NewSearch:
    """The search that a request body asks for; raises :class:`InvalidInput`."""
    question, options = parse_request(body, settings)
    document, chosen = question_json(question), options.model_dump()
    return NewSearch(
        id=uuid.uuid4().hex,
        request_key=request_key(document, chosen),
        problem=pack(document),
        summary=summary_of(question),
        options=chosen,
    )


def parse_request(body: Any, settings: Settings) -> tuple[Question, OptionsDocument]:
    """The problem and options of a request body; raises :class:`InvalidInput`."""
    request = parse_body(SearchRequest, body)
    question = read_question(request.problem, settings.max_cells)
    limit = request.options.time_limit
    if limit is not None and limit > settings.max_time_limit:
        raise InvalidInput.at(
            "/options/time_limit",
            f"found {limit:.15g}; this service takes at most {settings.max_time_limit:.15g} seconds.",
        )
    highest = settings.max_effort
    if EFFORTS.index(request.options.effort) > EFFORTS.index(highest):
        raise InvalidInput.at(
            "/options/effort",
            f"found {request.options.effort}; this service takes at most {highest}.",
        )
    return question, request.options


def request_key(problem: dict[str, Any], options: dict[str, Any]) -> str:
    """Hash of what determines an answer: the normalised problem, the options, and the planner's version."""
    asked = {"problem": problem, "options": options, "version": __version__}
    return hashlib.sha256(canonical_json(asked).encode()).hexdigest()


def _known(search_id: str) -> str:
    """The id, if it can be one: not every text is one that a database takes."""
    if not _ID.fullmatch(search_id):
        raise _not_found(search_id)
    return search_id


def _found(record: SearchRecord | None, search_id: str) -> SearchRecord:
    if record is None:
        raise _not_found(search_id)
    return record


def _not_found(search_id: str) -> ProblemError:
    return ProblemError(NOT_FOUND, f"found no search {search_id[:64]!r}; GET /v1/searches lists them.")
