"""A clock that moves only when someone pauses."""

from __future__ import annotations


class ManualClock:
    """In place of the host's clock."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def pause(self, seconds: float) -> None:
        self._now += seconds
