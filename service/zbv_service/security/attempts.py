"""Slows down those who guess tokens, and stops those who send one wrong token over and over.

A secret is too long to be guessed; this protects the database, which looks up every token that is not known
already. Many clients may share one address, behind a proxy for example, so a valid token is never refused:

- one wrong token that keeps coming from one address is answered without a look into the database;
- while many different wrong ones come from an address, or from everywhere, the look for a token that is not
  known waits for its turn, and the answer to a wrong one is delayed.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from ipaddress import IPv6Address, ip_address, ip_network

ALLOWED = 20
"""How often one wrong token may come from one address in a window, and how many different ones."""
ALLOWED_EVERYWHERE = 1000
"""Different wrong tokens from all addresses in a window."""
WINDOW_SECONDS = 60.0
REMEMBERED = 10_000
"""Addresses, and tokens of addresses. The oldest are forgotten."""
DELAY_SECONDS = 1.0
"""How much later a wrong token is answered while there are too many."""


class WrongSecret(Exception):
    """A token or a link does not work."""


class Attempts:
    """Counts wrong tokens. Of a token only its hash is kept."""

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
        """How long an address has to wait before it sends this very token again; 0 when it need not."""
        count, left = self._of_token.of((_place(address), _digest(text)))
        return math.ceil(left) if count >= ALLOWED else 0

    def is_slowed(self, address: str) -> bool:
        """Whether too many different wrong tokens came from an address, or from everywhere."""
        return (
            self._of_place.of(_place(address))[0] >= ALLOWED
            or self._everywhere.of(None)[0] >= ALLOWED_EVERYWHERE
        )


class _Counts:
    """Counts by key, each within a window that begins with the key's first count."""

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
    """Whoever has one IPv6 address has a whole network of them."""
    try:
        found = ip_address(address)
    except ValueError:
        return address
    return str(ip_network((found, 64), strict=False)) if isinstance(found, IPv6Address) else address
