"""Slows down guessing of tokens, and stops clients that repeat the same wrong token.

A secret is too long to guess; this protects the database, which looks up every token that is not
cached. Many clients may share one address, for example behind a proxy, so a valid token is never refused:

- a wrong token that is repeated from one address is answered without a query;
- while many different wrong tokens arrive from one address or in total, queries for tokens that are not
  cached queue, and responses to wrong ones are delayed.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from ipaddress import IPv6Address, ip_address, ip_network

ALLOWED = 20
"""Most repetitions of a wrong token from one address in a window, and most different wrong tokens."""
ALLOWED_EVERYWHERE = 1000
"""Most different wrong tokens from all addresses in a window."""
WINDOW_SECONDS = 60.0
REMEMBERED = 10_000
"""Most addresses and tokens that are counted; the oldest are dropped."""
DELAY_SECONDS = 1.0
"""Delay of the response to a wrong token while there are too many."""


class WrongSecret(Exception):
    """A token or link is invalid."""


class Attempts:
    """Counts wrong tokens, of which it keeps only hashes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._of_token = _Counts(clock)
        self._of_place = _Counts(clock)
        self._everywhere = _Counts(clock)

    def failed(self, address: str, text: str) -> None:
        """Count a wrong token."""
        place = _place(address)
        if self._of_token.add((place, _digest(text))) == 1:
            self._of_place.add(place)
            self._everywhere.add(None)

    def wait_seconds(self, address: str, text: str) -> int:
        """Seconds that an address must wait before it sends this token again; 0 if it need not wait."""
        count, left = self._of_token.of((_place(address), _digest(text)))
        return math.ceil(left) if count >= ALLOWED else 0

    def is_slowed(self, address: str) -> bool:
        """Whether too many different wrong tokens came from an address or in total."""
        return (
            self._of_place.of(_place(address))[0] >= ALLOWED
            or self._everywhere.of(None)[0] >= ALLOWED_EVERYWHERE
        )


class _Counts:
    """Counts per key within a window that begins with the key's first count."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._found: OrderedDict[Hashable, tuple[int, float]] = OrderedDict()

    def add(self, key: Hashable) -> int:
        """Count; returns the new count."""
        count, left = self.of(key)
        since = self._found[key][1] if left > 0 else self._clock()
        self._found[key] = (count + 1, since)
        self._found.move_to_end(key)
        while len(self._found) > REMEMBERED:
            self._found.popitem(last=False)
        return count + 1

    def of(self, key: Hashable) -> tuple[int, float]:
        """The count of a key and the seconds until its window ends."""
        count, since = self._found.get(key, (0, -math.inf))
        left = WINDOW_SECONDS - (self._clock() - since)
        return (count, left) if left > 0 else (0, 0.0)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="replace")).digest()


def _place(address: str) -> str:
    """The address, or the /64 network of an IPv6 address, which belongs to one client."""
    try:
        found = ip_address(address)
    except ValueError:
        return address
    return str(ip_network((found, 64), strict=False)) if isinstance(found, IPv6Address) else address
