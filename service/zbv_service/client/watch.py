"""Following a search to its end: what is known of it, and how long to wait for more. It waits for nothing
itself."""

from __future__ import annotations

import time
from collections.abc import Callable

from zbv_service.client.answers import Search, SearchEvent
from zbv_service.client.errors import SearchEnded, SearchTimeout

POLL_SECONDS = (0.05, 1.0)
"""First and longest pause between two looks at a search, where its events cannot be had."""
SILENCE_SECONDS = 45.0
"""A stream that is silent for longer is dead: the service says something more often."""


class Watch:
    """What a caller sees of a search.

    Parameters
    ----------
    on_progress
        Called with every state that differs from the one before.
    timeout
        Seconds after which the caller gives up; None never does.
    """

    def __init__(
        self,
        search: Search,
        on_progress: Callable[[Search], None] | None,
        timeout: float | None,
    ):
        self.search = search
        self._on_progress = on_progress
        self._timeout = timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._pause, self._longest = POLL_SECONDS
        if on_progress is not None:
            on_progress(search)

    def saw(self, search: Search) -> None:
        """The search as the service describes it now."""
        if search != self.search and self._on_progress is not None:
            self._on_progress(search)
        self.search = search

    def heard(self, event: SearchEvent) -> None:
        """Something happened to it; what is older than what is known of it is passed over."""
        if event.data.get("attempts", self.search.attempts) >= self.search.attempts:
            self.saw(self.search.after(event))

    def patience(self) -> float:
        """Seconds to wait for the next sign; raises :class:`SearchTimeout` when none are left."""
        if self._deadline is None or self._timeout is None:
            return SILENCE_SECONDS
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise SearchTimeout(self.search, self._timeout)
        return min(left, SILENCE_SECONDS)

    def pause(self) -> float:
        """Seconds until the next look, where looking again is all there is."""
        pause = min(self._pause, self.patience())
        self._pause = min(self._longest, 1.5 * self._pause)
        return pause

    def result(self) -> Search:
        """The search that has ended; raises :class:`SearchEnded` when it has no plan."""
        if self.search.plan_id is None:
            raise SearchEnded(self.search)
        return self.search
