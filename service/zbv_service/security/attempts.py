"""Slows those down who try tokens.

A secret is too long to be guessed; this is for the database, which every wrong token would cost a look.
Whoever shows a token that is known to work is never slowed down.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from ipaddress import IPv6Address, ip_address, ip_network

ALLOWED = 20
"""Wrong tokens from one address in a window."""
WINDOW_SECONDS = 60.0
REMEMBERED = 10_000
"""Addresses."""


class Attempts:
    """Counts the wrong tokens of each address."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._failures: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def failed(self, address: str) -> None:
        """Count a wrong token."""
        place = _place(address)
        count, since = self._failures.get(place, (0, 0.0))
        now = self._clock()
        self._failures[place] = (1, now) if now - since > WINDOW_SECONDS else (count + 1, since)
        self._failures.move_to_end(place)
        while len(self._failures) > REMEMBERED:
            self._failures.popitem(last=False)

    def wait_seconds(self, address: str) -> int:
        """How long an address has to wait before the next try; 0 when it need not."""
        count, since = self._failures.get(_place(address), (0, 0.0))
        left = WINDOW_SECONDS - (self._clock() - since)
        return math.ceil(left) if count >= ALLOWED and left > 0 else 0


def _place(address: str) -> str:
    """Whoever has one IPv6 address has a whole network of them."""
    try:
        found = ip_address(address)
    except ValueError:
        return address
    return str(ip_network((found, 64), strict=False)) if isinstance(found, IPv6Address) else address
