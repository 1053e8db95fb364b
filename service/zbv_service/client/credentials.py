"""The token that goes along with every request."""

from __future__ import annotations

from collections.abc import Generator

import httpx

from zbv_service import client_token


class Bearer(httpx.Auth):
    """Sends a token, the given one or else the one that is found; an empty one is none.

    One that was found is looked for again when the service does not know it: services that are started
    anew on this machine leave a new one, and files of secrets change. httpx itself would also look into
    ``~/.netrc``, and send a password from there.
    """

    def __init__(self, token: str | None, base_url: str):
        self._base_url = base_url
        self._is_found = token is None
        self._token = client_token.find(base_url) if token is None else token

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Send a request, and a second time when there is another token by then."""
        response = yield self._signed(request)
        if response.status_code != 401 or not self._is_found:
            return
        fresh = client_token.find(self._base_url)
        if fresh and fresh != self._token:
            self._token = fresh
            yield self._signed(request)

    def _signed(self, request: httpx.Request) -> httpx.Request:
        if self._token:
            request.headers["Authorization"] = f"Bearer {self._token}"
        return request
