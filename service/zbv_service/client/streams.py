"""Following a search's events over connections that break: what to ask for next, and when. It carries nothing
itself."""

from __future__ import annotations

import time

import httpx

from zbv_service.client import calls
from zbv_service.client.answers import SearchEvent
from zbv_service.client.calls import Call, is_stream
from zbv_service.client.events import EventReader
from zbv_service.client.retries import Attempts, Retries

STEADY_SECONDS = 10.0
"""A connection that has lasted for so long was a good one, even if nothing happened to the search."""


class Stream:
    """A search's events, from connection to connection.

    Parameters
    ----------
    reader
        Knows the last event that was read; it may have read other streams before.
    """

    def __init__(self, search_id: str, reader: EventReader, retries: Retries, address: str):
        self._search_id = search_id
        self._reader = reader
        self._attempts = Attempts(retries, address)
        self._began = 0.0
        self._told: float | None = None

    def open(self) -> Call[None]:
        """The call that goes on where the last connection broke."""
        self._reader.restart()
        self._began, self._told = time.monotonic(), None
        return calls.events(self._search_id, self._reader.last_id)

    def accept(self, response: httpx.Response) -> bool:
        """Whether there are events to come.

        Raises
        ------
        httpx.HTTPStatusError
            When the service says to come back later; :meth:`broke` knows when.
        ClientError
            When it refuses, or the answer is something else.
        """
        self._told = self._attempts.after_answer(response)
        if self._told is not None:
            raise httpx.HTTPStatusError("later", request=response.request, response=response)
        return is_stream(calls.checked(response))

    def feed(self, chunk: bytes) -> list[SearchEvent]:
        """Take what came; the events that it completes."""
        events = self._reader.feed(chunk)
        if events or time.monotonic() - self._began > STEADY_SECONDS:
            self._attempts.renew()
        return events

    def broke(self, error: httpx.HTTPError | None) -> float:
        """Seconds until the next connection; raises :class:`ServiceUnreachable` after the last one.

        Without an error, the stream ended although the search did not: its service stops, or the token that
        asked for it was revoked, which the next answer says.
        """
        if self._told is not None:
            return self._told
        ended = httpx.RemoteProtocolError("the stream ended before the search")
        return self._attempts.after_error(error or ended)
