"""The interface of executors, which compute searches for the runner.

There are two: processes on this machine (:mod:`zbv_service.searches.executors.local`), and a Dask cluster
(:mod:`zbv_service.searches.executors.cluster.executor`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from zbv_service.records.searches import Claim, Outcome, Update
from zbv_service.searches.executors.task import Compute


class SearchCrashed(Exception):
    """The process of a search died, possibly because of it; the message says how: ``its worker died``."""


class SearchLost(Exception):
    """The process of a search is gone or unreachable for reasons outside the search."""


class SearchEvicted(SearchLost):
    """The process of a search received a signal to end. Only repeated evictions count against the search."""


class Computation(Protocol):
    """One search in an executor."""

    def stop(self) -> None:
        """Ask the search to return its best plan, now or as soon as it begins."""

    def kill(self) -> None:
        """Kill the computation, or give it up where killing is impossible; its process then continues."""

    @property
    def is_under_way(self) -> bool:
        """Whether its process has begun to compute."""

    async def plan(self) -> Outcome:
        """Compute the plan; called once.

        Raises
        ------
        SearchCrashed, SearchLost
            The computation did not finish.
        Exception
            Any error of the search itself.
        """


class SearchExecutor(Protocol):
    """Computes searches between :meth:`start` and :meth:`stop`."""

    async def start(self) -> None:
        """Start; connections that fail are tried again later."""

    async def stop(self) -> None:
        """Release all resources."""

    def kill(self) -> None:
        """Kill every computation now."""

    @property
    def slots(self) -> int:
        """The number of searches that can run at the same time."""

    @property
    def shared_slots(self) -> int | None:
        """The number of slots of all services together, if they share them; otherwise None."""

    @property
    def trouble(self) -> str | None:
        """Why no search can be computed now; None if one can."""

    def expect(self, claim: Claim, compute: Compute, on_update: Callable[[Update], None]) -> Computation:
        """Prepare a search; ``on_update`` is called in the event loop."""
