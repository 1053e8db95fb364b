"""When a client repeats a request, and after which pause."""

from __future__ import annotations

import random
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx

from zbv_service.client.errors import ServiceUnreachable

TRANSIENT = frozenset({429, 502, 503, 504})
"""Statuses that a later attempt may not get."""
DEFAULT_TIMEOUT = 30.0
"""Seconds for one request."""
DEFAULT_RETRIES = 4


@dataclass(frozen=True)
class Retries:
    """How often and how long a client retries."""

    count: int = DEFAULT_RETRIES
    """How often a request is repeated at most."""
    first: float = 0.1
    longest: float = 5.0
    """Seconds before the first repetition, and the limit that doubling them reaches."""
    longest_retry_after: float = 60.0
    """The longest Retry-After, in seconds, that the client obeys. When the service asks for more, the
    caller gets the error at once."""

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError(f"found {self.count} retries; must be at least 0.")


class RetryState:
    """Counts the attempts at one request and decides after each whether to repeat it."""

    def __init__(self, retries: Retries, address: str):
        self._retries = retries
        self._address = address
        self.reset()

    def reset(self) -> None:
        """Forget earlier failures: the connection has been healthy since."""
        self._left = self._retries.count
        self._pause = self._retries.first

    def after_response(self, response: httpx.Response) -> float | None:
        """Seconds until the next attempt; None when the response is final."""
        asked = _retry_after(response.headers.get("retry-after", ""))
        if (
            response.status_code not in TRANSIENT
            or self._left == 0
            or asked > self._retries.longest_retry_after
        ):
            return None
        return asked + self._next_pause()

    def after_error(self, error: httpx.HTTPError | httpx.InvalidURL) -> float:
        """Seconds until the next attempt; raises :class:`ServiceUnreachable` after the last one."""
        if isinstance(error, httpx.InvalidURL | httpx.UnsupportedProtocol):
            raise ServiceUnreachable(
                f"{self._address} is not an address: {str(error).rstrip('.')}. Use one such as "
                f"http://127.0.0.1:8000."
            ) from error
        if self._left == 0:
            raise ServiceUnreachable(
                f"no answer from {self._address}: {str(error).rstrip('.') or type(error).__name__}. "
                f"{_advice(error)}"
            ) from error
        return self._next_pause()

    def _next_pause(self) -> float:
        self._left -= 1
        pause, self._pause = self._pause, min(self._retries.longest, 2 * self._pause)
        # Without jitter, thousands of ranks that were disconnected together would come back together.
        return pause * random.uniform(0.5, 1.0)


def _advice(error: BaseException) -> str:
    found: BaseException | None = error
    while found is not None and not isinstance(found, ssl.SSLError):
        found = found.__cause__ or found.__context__
    if isinstance(found, ssl.SSLCertVerificationError):
        return (
            "Pass the authority that signed its certificate (--tls-ca), and use the host name that the "
            "certificate contains."
        )
    if found is not None:
        return "Does the service use TLS there, and does it ask for a client certificate (--tls-cert)?"
    return "Is the service running there? (zbv-service serve)"


def _retry_after(text: str) -> float:
    """Parse a Retry-After header, seconds or an HTTP date; returns seconds, 0 when it asks for nothing."""
    text = text.strip()
    if text.isdecimal():
        return float(text)
    try:
        moment = parsedate_to_datetime(text)
    except (TypeError, ValueError):
        return 0.0
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return max(0.0, (aware - datetime.now(UTC)).total_seconds())
