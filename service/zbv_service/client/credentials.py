"""Adding the token to every request."""

from __future__ import annotations

from collections.abc import Generator

import httpx

from zbv_service.client import tokens


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
