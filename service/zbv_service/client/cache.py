"""A cache of answers that never change, each with its ETag."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import httpx

from zbv_service.client.calls import Call
from zbv_service.client.errors import InvalidAnswer

CAPACITY = 64


class AnswerCache:
    """The most recently used immutable answers of a client."""

    def __init__(self) -> None:
        self._answers: OrderedDict[str, tuple[str, Any]] = OrderedDict()

    def headers(self, call: Call[Any]) -> dict[str, str]:
        """The conditional headers of a request: with them the service does not send a cached answer again."""
        cached = self._answers.get(call.path) if call.is_immutable else None
        return {} if cached is None else {"If-None-Match": cached[0]}

    def read(self, call: Call[Any], response: httpx.Response) -> Any:
        """The result of a response; a 304 is answered from the cache."""
        if response.status_code == 304:
            cached = self._answers.get(call.path)
            if cached is None:
                raise InvalidAnswer(f"{response.url} answered 304 to an unconditional request.")
            self._answers.move_to_end(call.path)
            return cached[1]
        result = call.read(response)
        tag = response.headers.get("etag")
        if call.is_immutable and tag:
            self._answers[call.path] = (tag, result)
            while len(self._answers) > CAPACITY:
                self._answers.popitem(last=False)
        return result
