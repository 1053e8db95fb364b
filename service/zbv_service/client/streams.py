"""State of an event stream that continues over several connections. This module sends nothing."""

from __future__ import annotations

import time

import httpx
from httpx_sse import ServerSentEvent

from zbv_service.client.answers import Event
from zbv_service.client.calls import Call, as_nothing, checked
from zbv_service.client.errors import InvalidAnswer
from zbv_service.client.retries import Retries, RetryState

END = "end"
"""The kind of the last event of a stream."""
STEADY_SECONDS = 10.0
"""A connection that lasted this long was healthy, even if it carried no event."""


class Stream:
    """A stream of server-sent events, from connection to connection.

    Parameters
    ----------
    path
        Where the service sends the stream.
    last_id
        The id of the last event that the caller has; None starts with the first event.
    """

    def __init__(self, path: str, retries: Retries, address: str, last_id: str | None = None):
        self._path = path
        self._last_id = last_id
        self._retries = RetryState(retries, address)
        self._opened_at = 0.0
        self._retry_after: float | None = None

    def open(self) -> Call[None]:
        """The request for the events after the last one read."""
        self._opened_at, self._retry_after = time.monotonic(), None
        headers = {"Accept": "text/event-stream", "Cache-Control": "no-store"}
        if self._last_id is not None:
            headers["Last-Event-ID"] = self._last_id
        return Call("GET", self._path, as_nothing, headers=headers)

    def accept(self, response: httpx.Response) -> bool:
        """Whether the response is a stream; 204 means that there are no more events.

        Raises
        ------
        httpx.HTTPStatusError
            When the service asks to come back later; :meth:`broke` returns the pause.
        ClientError
            When it refuses, or the response is something else.
        """
        self._retry_after = self._retries.after_response(response)
        if self._retry_after is not None:
            raise httpx.HTTPStatusError("later", request=response.request, response=response)
        if checked(response).status_code == 204:
            return False
        found = response.headers.get("content-type", "")
        if not found.startswith("text/event-stream"):
            raise InvalidAnswer(
                f"{response.url} answered with {found or 'no content type'}; it must be text/event-stream."
            )
        return True

    def read(self, sent: ServerSentEvent) -> Event | None:
        """Convert an event; None when it has no data, as the standard demands."""
        if not sent.data:
            return None
        try:
            data = sent.json()
        except ValueError:
            raise InvalidAnswer(
                "the service sent an event that is not JSON; is this a zbv service?"
            ) from None
        if not isinstance(data, dict):
            raise InvalidAnswer("the service sent an event that is not a JSON object; is this a zbv service?")
        self._last_id = sent.id or self._last_id
        self._retries.reset()
        return Event(self._last_id or "", sent.event, data)

    def received(self) -> None:
        """Note that bytes arrived, which may be a comment that only keeps the connection alive."""
        if time.monotonic() - self._opened_at > STEADY_SECONDS:
            self._retries.reset()

    def broke(self, error: httpx.HTTPError | None) -> float:
        """Seconds until the next connection; raises :class:`ServiceUnreachable` after the last attempt.

        ``error`` is None when the service closed the stream before its last event: it is shutting down, or
        the token was revoked, which the next response says.
        """
        if self._retry_after is not None:
            return self._retry_after
        ended = httpx.RemoteProtocolError("the stream ended before its last event")
        return self._retries.after_error(error or ended)
