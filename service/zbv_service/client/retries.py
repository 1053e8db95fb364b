"""When a request is sent again, and after how long."""

from __future__ import annotations

import random
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx

from zbv_service.client.errors import ServiceUnreachable

PASSING = frozenset({429, 502, 503, 504})
"""Statuses that a later request may not meet."""
CONFLICT = 409
"""This one neither, when the service says when to come back: the same request is being answered."""
DEFAULT_TIMEOUT = 30.0
"""Seconds for one request."""
DEFAULT_RETRIES = 4


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

    count: int = DEFAULT_RETRIES
    first: float = 0.1
    longest: float = 5.0
    longest_told: float = 60.0

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError(f"found {self.count} retries; must be at least 0.")


class Attempts:
    """The attempts at one request: says after each whether and when there is another."""

    def __init__(self, retries: Retries, address: str):
        self._retries = retries
        self._address = address
        self.renew()

    def renew(self) -> None:
        """Begin anew: what was tried has gone well for a while, and later trouble is another trouble."""
        self._left = self._retries.count
        self._pause = self._retries.first

    def after_answer(self, response: httpx.Response) -> float | None:
        """Seconds until the next attempt; None when the answer is to be taken as it is."""
        told = _told(response.headers.get("retry-after", ""))
        is_passing = response.status_code in PASSING or (response.status_code == CONFLICT and told > 0)
        if not is_passing or self._left == 0 or told > self._retries.longest_told:
            return None
        return told + self._next()

    def after_error(self, error: httpx.HTTPError | httpx.InvalidURL) -> float:
        """Seconds until the next attempt; raises :class:`ServiceUnreachable` after the last one."""
        if isinstance(error, httpx.InvalidURL | httpx.UnsupportedProtocol):
            raise ServiceUnreachable(
                f"{self._address} is no address: {str(error).rstrip('.')}. Give one such as "
                f"http://127.0.0.1:8000."
            ) from error
        if self._left == 0:
            raise ServiceUnreachable(
                f"no answer from {self._address}: {str(error).rstrip('.') or type(error).__name__}. "
                f"{_advice(error)}"
            ) from error
        return self._next()

    def _next(self) -> float:
        self._left -= 1
        pause, self._pause = self._pause, min(self._retries.longest, 2 * self._pause)
        # Spread out, or thousands of ranks that were cut off together come back together.
        return pause * random.uniform(0.5, 1.0)


def _advice(error: BaseException) -> str:
    found: BaseException | None = error
    while found is not None and not isinstance(found, ssl.SSLError):
        found = found.__cause__ or found.__context__
    if isinstance(found, ssl.SSLCertVerificationError):
        return "Name the authority of its certificate (--tls-ca), and the host as the certificate does."
    if found is not None:
        return "Does the service speak TLS there, and does it want a certificate (--tls-cert)?"
    return "Is the service running there? (zbv-service serve)"


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
