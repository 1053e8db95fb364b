"""Sending requests with a token and retries, and reading event streams."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
from httpx_sse import EventSource, ServerSentEvent

from zbv_service.client import tls, tokens
from zbv_service.client.answers import Event
from zbv_service.client.calls import HEADERS, below, checked
from zbv_service.client.errors import InvalidAnswer
from zbv_service.client.retries import DEFAULT_RETRIES, DEFAULT_TIMEOUT, Retries, RetryState


class Bearer(httpx.Auth):
    """Sends a bearer token: the given one, or the one that is found; none when it is empty.

    When the service does not accept a token that was found, the client looks for it again: a restarted local
    service may have a new token, and token files may be replaced. Because of this class httpx does not send
    passwords from ``~/.netrc``.
    """

    def __init__(self, token: str | None, base_url: str):
        self._base_url = base_url
        self._is_found = token is None
        self._token = tokens.find(base_url) if token is None else token

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Send a request, and once more after a 401 when there is a new token."""
        response = yield self._signed(request)
        if response.status_code != 401 or not self._is_found:
            return
        fresh = tokens.find(self._base_url)
        if fresh and fresh != self._token:
            self._token = fresh
            yield self._signed(request)

    def _signed(self, request: httpx.Request) -> httpx.Request:
        if self._token:
            request.headers["Authorization"] = f"Bearer {self._token}"
        return request


T = TypeVar("T")
END = "end"
"""The kind of the last event of a stream."""
STEADY_SECONDS = 10.0
"""A connection that lasted this long was healthy, even if it carried no event."""


class Connection:
    """A connection to a service.

    Parameters
    ----------
    base_url
        The service's address, such as ``http://127.0.0.1:8000``.
    token
        The bearer token of every request. None uses the token that :func:`zbv_service.client.tokens.find`
        finds; an empty string sends no token.
    timeout
        Seconds for one request.
    retries
        How often to repeat a request that got no answer or a transient error, or the whole policy. Every
        request may be repeated, because those that create something carry a key or an id.
    verify
        How to check the service's certificate, as in httpx; a context can also hold a client certificate.
        True uses what :func:`zbv_service.client.tls.find` finds in the environment.
    transport
        Replaces the network, for tests.
    """

    def __init__(
        self,
        base_url: str,
        *,
        token: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        retries: int | Retries = DEFAULT_RETRIES,
        verify: ssl.SSLContext | bool = True,
        transport: httpx.BaseTransport | None = None,
    ):
        self._retries = retries if isinstance(retries, Retries) else Retries(retries)
        self._timeout = timeout
        self._http = httpx.Client(
            base_url=base_url,
            timeout=timeout,
            auth=Bearer(token, base_url),
            headers=HEADERS,
            verify=tls.find() if verify is True else verify,
            transport=transport,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def base_url(self) -> str:
        """The service's address, without a trailing slash."""
        return str(self._http.base_url).rstrip("/")

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _get(self, read: Callable[[httpx.Response], T], *path: str, **params: Any) -> T:
        return self._call("GET", below(*path), read, params=params)

    def _post(
        self, read: Callable[[httpx.Response], T], *path: str, json: Any = None, key: str | None = None
    ) -> T:
        headers = {} if key is None else {"Idempotency-Key": key}
        body = {} if json is None else {"json": json}
        return self._call("POST", below(*path), read, headers=headers, **body)

    def _call(
        self,
        method: str,
        path: str,
        read: Callable[[httpx.Response], T],
        params: Mapping[str, Any] | None = None,
        **request: Any,
    ) -> T:
        """Send a request, again if need be, and read the successful response.

        Parameters
        ----------
        params, request
            The query, without its values of None, and other arguments of httpx.
        """
        query = {name: value for name, value in (params or {}).items() if value is not None}
        if query:  # a link to the next page has its own query, which an empty one would remove
            request["params"] = query
        state = RetryState(self._retries, self.base_url)
        while True:
            try:
                response = self._http.request(method, path, **request)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                pause = state.after_error(error)
            else:
                asked = state.after_response(response)
                if asked is None:
                    return read(checked(response))
                pause = asked
            time.sleep(pause)

    def _stream(self, path: str, last_id: str | None = None) -> Stream:
        return Stream(path, self._retries, self.base_url, last_id)

    def _events(self, stream: Stream, patience: Callable[[], float]) -> Iterator[Event]:
        """Yield the events of a stream until its last one, and reconnect when the connection breaks.

        ``patience`` returns how many seconds of silence to accept, or raises to give up.
        """

        def received() -> None:
            patience()
            stream.received()

        while True:
            broken: httpx.HTTPError | None = None
            try:
                timeout = httpx.Timeout(self._timeout, read=patience())
                with self._http.stream(
                    "GET", stream.path, headers=stream.open(), timeout=timeout
                ) as response:
                    if not response.is_success:
                        response.read()
                    if not stream.accept(response):
                        return
                    response.stream = Body(response.stream, received)
                    for sent in EventSource(response).iter_sse():
                        event = stream.read(sent)
                        if event is not None:
                            yield event
                            if event.kind == END:
                                return
            except httpx.HTTPError as error:
                broken = error
            patience()
            time.sleep(stream.broke(broken))


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
        self.path = path
        self._last_id = last_id
        self._retries = RetryState(retries, address)
        self._opened_at = 0.0
        self._retry_after: float | None = None

    def open(self) -> dict[str, str]:
        """The headers of a request for the events after the last one read."""
        self._opened_at, self._retry_after = time.monotonic(), None
        headers = {"Accept": "text/event-stream", "Cache-Control": "no-store"}
        if self._last_id is not None:
            headers["Last-Event-ID"] = self._last_id
        return headers

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


class Body(httpx.SyncByteStream):
    """A response's body that reports every chunk, comments of an event stream included."""

    def __init__(self, body: Any, received: Callable[[], None]):
        self._body = body
        self._received = received

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._body:
            self._received()
            yield chunk

    def close(self) -> None:
        """Close the response's body."""
        self._body.close()
