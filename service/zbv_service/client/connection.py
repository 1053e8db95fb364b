"""Sending requests with a token and retries, and reading event streams."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Generator, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
from httpx_sse import EventSource

from zbv_service.client import tls, tokens
from zbv_service.client.answers import Event
from zbv_service.client.calls import HEADERS, Call, below, checked
from zbv_service.client.retries import DEFAULT_RETRIES, DEFAULT_TIMEOUT, Retries, RetryState
from zbv_service.client.streams import END, Stream


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
        return self._call(Call("GET", below(*path), read, params=params))

    def _post(
        self, read: Callable[[httpx.Response], T], *path: str, json: Any = None, key: str | None = None
    ) -> T:
        headers = {} if key is None else {"Idempotency-Key": key}
        return self._call(Call("POST", below(*path), read, json=json, headers=headers))

    def _call(self, call: Call[T]) -> T:
        return call.read(checked(self._send(call)))

    def _send(self, call: Call[Any]) -> httpx.Response:
        state = RetryState(self._retries, self.base_url)
        while True:
            try:
                request = self._http.build_request(**call.request)
                response = self._http.send(request)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                pause = state.after_error(error)
            else:
                asked = state.after_response(response)
                if asked is None:
                    return response
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
                with self._http.stream(**stream.open().request, timeout=timeout) as response:
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
