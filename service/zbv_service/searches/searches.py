"""Accepts, reads and cancels searches of all kinds. :mod:`zbv_service.searches.runner` runs them."""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from zbv_solver.problem.reading import parse_any_problem

from zbv_service.compute.computations import Computations
from zbv_service.database import SearchInUse, SearchTable, TooManySearches
from zbv_service.documents.problems import (
    Question,
    unpack,
    unpack_text,
)
from zbv_service.errors import CONFLICT, NOT_FOUND, TOO_MANY_SEARCHES, ApiError
from zbv_service.records.lists import Page, Position, SearchListQuery
from zbv_service.records.searches import NewSearch, SearchKind, SearchRecord
from zbv_service.searches.kinds import Kind
from zbv_service.searches.runner import Runner
from zbv_service.security.tokens import Grant
from zbv_service.settings import Settings

RETRY_SECONDS = 5
"""Retry-After in seconds for a caller at its limit of searches."""
_ID = re.compile(r"[0-9a-f]{32}")
S = TypeVar("S", bound=SearchRecord)

logger = logging.getLogger(__name__)


def parse_packed(packed: bytes) -> Question:
    """The problem of a packed document."""
    return parse_any_problem(unpack(packed))


class Searches:
    """The searches of a service."""

    def __init__(
        self,
        table: SearchTable,
        runner: Runner,
        kinds: Mapping[SearchKind, Kind],
        settings: Settings,
        computations: Computations,
    ):
        self._kinds = kinds
        self._table = table
        self._computations = computations
        self._runner = runner
        self._settings = settings

    async def submit(self, body: Any, grant: Grant | None = None, kind: SearchKind = "plan") -> SearchRecord:
        """Queue the search of a request body, or return the search that already answers it.

        Parameters
        ----------
        body
            JSON text, or the decoded document.
        grant
            The caller's; None for the service itself, which has no limit of unfinished searches.

        Raises
        ------
        InvalidInput
            The body breaks a rule; nothing was stored.
        ApiError
            429: the caller has too many searches. 503: too many bodies wait to be read.
        """
        is_text = isinstance(body, bytes | bytearray)
        compute = self._computations.of_body if is_text else self._computations.of_document
        new = await compute(partial(self._kinds[kind].read, self._settings), body)
        return await self.submit_read(new, grant)

    async def submit_read(
        self, new: NewSearch, grant: Grant | None = None, *, for_run: bool = False
    ) -> SearchRecord:
        """As :meth:`submit` for a search that :attr:`Kind.read` has made.

        Parameters
        ----------
        for_run
            Whether only a run waits for it, which releases it with :meth:`cancel_unwanted`.
        """
        most = None
        if grant is not None:
            most = grant.max_searches or self._settings.max_searches_per_token
        try:
            # A run that submits its search again needs another id.
            new = replace(new, id=uuid.uuid4().hex, created_by=None if grant is None else grant.name)
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
        return record

    async def get(self, search_id: str) -> SearchRecord:
        """A search of any kind; raises :class:`ApiError` 404."""
        # Databases reject some texts.
        record = await self._table.get(search_id) if _ID.fullmatch(search_id) else None
        if record is None:
            raise self._not_found(search_id)
        return record

    async def find(self, search_id: str) -> SearchRecord | None:
        """A search of any kind, None if it was removed."""
        return await self._table.get(search_id)

    async def text(self, record: SearchRecord) -> bytes:
        """A search as JSON, with its jitter and its answer."""
        answer = None if record.kind == "plan" else await self.answer(record)
        return await asyncio.to_thread(record.whole, answer)

    async def answer(self, record: SearchRecord) -> bytes | None:
        """The packed answer of a search for layouts; None before its end."""
        return await self._table.answer(record.id)

    async def asked(self, search_id: str, document: type[S]) -> tuple[S, bytes]:
        """A search of this class and its packed problem; raises :class:`ApiError` 404."""
        record, packed = await self.get(search_id), await self.problem(search_id)
        if packed is None or not isinstance(record, document):
            raise self._not_found(search_id)
        return record, packed

    async def problem(self, search_id: str) -> bytes | None:
        """The packed problem document of a search, None if it was removed."""
        return await self._table.problem(search_id)

    async def problem_text(self, search_id: str) -> bytes:
        """The normalised problem document of a search, as JSON text; raises :class:`ApiError` 404."""
        _, packed = await self.asked(search_id, SearchRecord)
        return await asyncio.to_thread(unpack_text, packed)

    async def page(self, wanted: SearchListQuery, after: Position | None = None) -> Page[SearchRecord]:
        """One page of searches, newest first, starting at a position."""
        return await self._table.page(wanted, after)

    async def cancel(self, search_id: str) -> SearchRecord:
        """Ask a search to stop and keep its best plan; an ended search does not change."""
        await self.get(search_id)
        record = await self._table.request_cancel(search_id)
        if record is None:
            raise self._not_found(search_id)
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
                CONFLICT, f"run {error.run_id} waits for search {search_id}; cancel the run first."
            ) from None
        self._runner.cancel(search_id)

    async def cancel_unwanted(self, search_id: str) -> None:
        """Cancel a search after the run that waited for it was cancelled, unless others want its plan."""
        if await self._table.cancel_unwanted(search_id):
            self._runner.cancel(search_id)
            self._runner.wake()

    def _not_found(self, search_id: str) -> ApiError:
        return ApiError(NOT_FOUND, f"found no search {search_id[:64]!r}; GET /v1/searches lists them.")
