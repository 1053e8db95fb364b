"""Looks up tokens, and caches them briefly, because thousands of ranks fetch their plans at once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from zbv_service.database import DatabaseAway, TokenTable
from zbv_service.records.tokens import TokenRecord
from zbv_service.security.grants import Grant, grant_of_token
from zbv_service.security.scopes import SCOPES
from zbv_service.security.token_text import TokenText

FRESH_SECONDS = 1.0
"""Seconds for which a token is cached, and the longest time that a revoked token still works."""
STALE_SECONDS = 60.0
"""The same while the database is away, when tokens cannot be revoked either."""
REMEMBERED = 4096
USED_SECONDS = 60.0
"""Seconds between updates of a token's last use."""
LOCAL_NAME = "local"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Known:
    """A valid token, as looked up at the time ``at``."""

    hash: str
    grant: Grant
    at: float


class Tokens:
    """The tokens that a service accepts.

    Parameters
    ----------
    local
        The token for commands on this machine, which has all scopes and is not in the database.
    """

    def __init__(
        self,
        table: TokenTable,
        local: TokenText | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._table = table
        self._local = local
        self._clock = clock
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._looks: dict[str, asyncio.Task[_Known | None]] = {}
        self._notes: set[asyncio.Task[None]] = set()

    @property
    def local_grant(self) -> Grant | None:
        """The grant of the local token; None without one."""
        if self._local is None:
            return None
        return Grant(LOCAL_NAME, frozenset(SCOPES), "local", local_id=self._local.id)

    async def close(self) -> None:
        """Wait for queries and updates in progress."""
        await asyncio.gather(*self._looks.values(), *self._notes, return_exceptions=True)

    async def grant(self, text: str) -> Grant | None:
        """The grant of a token; None if it is not valid."""
        token = TokenText.parse(text)
        if token is None:
            return None
        if self._is_local(token):
            return self.local_grant
        known = self._known.get(token.id)
        if known is None or self._clock() - known.at > FRESH_SECONDS:
            known = await self._look(token.id)
        if known is None or not token.is_hashed_as(known.hash):
            return None
        return known.grant

    def forget(self, token_id: str) -> None:
        """Drop a token from the cache."""
        self._known.pop(token_id, None)

    def _is_local(self, token: TokenText) -> bool:
        return self._local is not None and token.id == self._local.id and token.is_hashed_as(self._local.hash)

    async def _look(self, token_id: str) -> _Known | None:
        """Look up a token in the database; concurrent requests share one query."""
        task = self._looks.get(token_id)
        if task is None:
            task = self._looks[token_id] = asyncio.create_task(self._ask(token_id))
            task.add_done_callback(lambda done: self._done(token_id, done))
        return await asyncio.shield(task)

    def _done(self, token_id: str, task: asyncio.Task[_Known | None]) -> None:
        self._looks.pop(token_id, None)
        if not task.cancelled():
            task.exception()  # mark it as retrieved: all waiting requests may have been cancelled

    async def _ask(self, token_id: str) -> _Known | None:
        try:
            record = await self._table.live(token_id)
        except DatabaseAway:
            known = self._known.get(token_id)
            if known is None or self._clock() - known.at > STALE_SECONDS:
                raise
            return known
        if record is None or record.kind == "link" or not self.has_root(record):
            self._known.pop(token_id, None)
            return None
        self._note_use(record)
        known = self._known[token_id] = _Known(record.secret_hash, grant_of_token(record), self._clock())
        self._known.move_to_end(token_id)
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return known

    def has_root(self, record: TokenRecord) -> bool:
        """Whether the token behind a session or link is accepted here.

        The database query has checked stored tokens. A session of a local token is accepted only by a service
        with that local token.
        """
        if record.kind == "token" or record.parent_id is not None:
            return True
        return self._local is not None and record.local_id == self._local.id

    def _note_use(self, record: TokenRecord) -> None:
        now = datetime.now(UTC)
        if record.used_at is not None and now - record.used_at < timedelta(seconds=USED_SECONDS):
            return
        task = asyncio.create_task(self._used(record.id))
        self._notes.add(task)
        task.add_done_callback(self._notes.discard)

    async def _used(self, token_id: str) -> None:
        try:
            await self._table.used(token_id)
        except DatabaseAway as error:
            logger.warning("%s The last use of token %s was not stored.", error, token_id)
