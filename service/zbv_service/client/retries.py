"""When a request is sent again, and after how long."""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx

from zbv_service.client.errors import ServiceUnreachable

PASSING = frozenset({429, 502, 503, 504})
"""Statuses that a later request may not meet."""


@dataclass(frozen=True)
class Retries:
    """How patient a client is.

    Attributes
    ----------
    count
        How often a request is repeated.
    first, longest
        Seconds before the first repetition, which double from one to the next, and their limit.
    longest_told
        Seconds that the service may ask for by Retry-After; for more its answer is the caller's to deal with.
    """

    count: int = 4
    first: float = 0.1
    longest: float = 5.0
    longest_told: float = 60.0

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError(f"found {self.count} retries; must be at least 0.")


class Attempts:
    """The attempts at one request: says after each whether and when there is another."""

    def __init__(self, retries: Retries, address: str, is_repeatable: bool):
        self._retries = retries
        self._address = address
        self._left = retries.count if is_repeatable else 0
        self._pause = retries.first

    def after_answer(self, response: httpx.Response) -> float | None:
        """Seconds until the next attempt; None when the answer is to be taken as it is."""
        told = _told(response.headers.get("retry-after", ""))
        if response.status_code not in PASSING or self._left == 0 or told > self._retries.longest_told:
            return None
        return max(told, self._next())

    def after_error(self, error: httpx.HTTPError | httpx.InvalidURL) -> float:
        """Seconds until the next attempt; raises :class:`ServiceUnreachable` after the last one."""
        if isinstance(error, httpx.InvalidURL | httpx.UnsupportedProtocol):
            raise ServiceUnreachable(
                f"{self._address} is no address: {error}. Give one such as http://127.0.0.1:8000."
            ) from error
        if self._left == 0:
            raise ServiceUnreachable(
                f"no answer from {self._address}: {error or type(error).__name__}. "
                f"Is the service running there? (zbv-service serve)"
            ) from error
        return self._next()

    def _next(self) -> float:
        self._left -= 1
        pause, self._pause = self._pause, min(self._retries.longest, 2 * self._pause)
        # Spread out, or thousands of ranks that were cut off together come back together.
        return pause * random.uniform(0.5, 1.0)


def _told(text: str) -> float:
    """What Retry-After asks for, in seconds: it is a number of them, or a moment."""
    text = text.strip()
    if text.isdecimal():
        return float(text)
    try:
        moment = parsedate_to_datetime(text)
    except (TypeError, ValueError):
        return 0.0
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return max(0.0, (aware - datetime.now(UTC)).total_seconds())
