"""State of waiting for a search: its last known state, and how long to wait for the next. This module sends
nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

from zbv_service.client.answers import Event, Search
from zbv_service.client.errors import SearchEnded, SearchTimeout

POLL_SECONDS = (0.05, 1.0)
"""First and longest pause between two polls, where the service's events cannot be read."""
SILENCE_SECONDS = 45.0
"""A stream that is silent for longer is dead: the service sends a comment more often than that."""


class Watch:
    """A search as the waiting caller knows it.

    Parameters
    ----------
    on_progress
        Called with the first state, and with every state that differs from the one before.
    timeout
        Seconds after which the caller gives up; None waits without limit.
    """

    def __init__(self, search: Search, on_progress: Callable[[Search], None] | None, timeout: float | None):
        self.search = search
        self._on_progress = on_progress
        self._timeout = timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._pause, self._longest = POLL_SECONDS
        if on_progress is not None:
            on_progress(search)

    def update(self, search: Search) -> None:
        """Take over the search as the service describes it now."""
        if search != self.search and self._on_progress is not None:
            self._on_progress(search)
        self.search = search

    def apply(self, event: Event) -> None:
        """Apply an event. Events of an earlier attempt at the search are ignored."""
        if event.data.get("attempts", self.search.attempts) >= self.search.attempts:
            self.update(self.search.after(event))

    def patience(self) -> float:
        """Seconds to wait for the next byte; raises :class:`SearchTimeout` after the deadline."""
        if self._deadline is None or self._timeout is None:
            return SILENCE_SECONDS
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise SearchTimeout(self.search, self._timeout)
        return min(left, SILENCE_SECONDS)

    def pause(self) -> float:
        """Seconds until the next poll; raises :class:`SearchTimeout` after the deadline."""
        pause = min(self._pause, self.patience())
        self._pause = min(self._longest, 1.5 * self._pause)
        return pause

    def result(self) -> Search:
        """The ended search; raises :class:`SearchEnded` when it has no plan or layout."""
        if self.search.plan_id is None:
            raise SearchEnded(self.search)
        return self.search
