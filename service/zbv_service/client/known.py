"""Answers that never change, kept with the tag by which the service knows them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import httpx

from zbv_service.client.calls import Call
from zbv_service.client.errors import InvalidAnswer

KEPT = 64


class KnownAnswers:
    """The most recently used immutable answers of a client."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[str, Any]] = OrderedDict()

    def headers(self, call: Call[Any]) -> dict[str, str]:
        """What to add to a request, so that an answer that is known is not sent again."""
        known = self._known.get(call.path) if call.is_immutable else None
        return {} if known is None else {"If-None-Match": known[0]}

    def read(self, call: Call[Any], response: httpx.Response) -> Any:
        """The result of an answer, from memory where the service says that it is the same."""
        if response.status_code == 304:
            known = self._known.get(call.path)
            if known is None:
                raise InvalidAnswer(f"{response.url} answered 304 to a question that was new.")
            self._known.move_to_end(call.path)
            return known[1]
        result = call.read(response)
        tag = response.headers.get("etag")
        if call.is_immutable and tag:
            self._known[call.path] = (tag, result)
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
        return result
