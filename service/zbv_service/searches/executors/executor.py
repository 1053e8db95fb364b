"""Where searches are computed: what the runner asks of an executor.

There are two: processes of this machine (:mod:`zbv_service.searches.executors.local`), and a Dask cluster
(:mod:`zbv_service.searches.executors.cluster.executor`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from zbv_service.records.searches import NewPlan, Update
from zbv_service.searches.executors.task import SearchFunction, SearchTask


class SearchCrashed(Exception):
    """The process of a search died, and the search may be why; the message says how: ``its worker died``."""


class SearchLost(Exception):
    """The process of a search is gone or out of reach, and the search is not why."""


class SearchEvicted(SearchLost):
    """The process of a search was told to end. The search is why only when that happens over and over."""


class Computation(Protocol):
    """One search in an executor."""

    def stop(self) -> None:
        """Ask it to return what it has, now or as soon as it begins."""

    def kill(self) -> None:
        """End it: it does not stop. Where that is not possible, give it up; then its process goes on."""

    @property
    def is_under_way(self) -> bool:
        """Whether its process has begun with it."""

    async def plan(self) -> NewPlan:
        """Have it computed, and wait for it; called once.

        Raises
        ------
        SearchCrashed, SearchLost
            See there.
        Exception
            Whatever the search raised.
        """


class SearchExecutor(Protocol):
    """Computes searches between :meth:`start` and :meth:`stop`."""

    async def start(self) -> None:
        """Begin; what cannot be reached yet is tried again later."""

    async def stop(self) -> None:
        """Let go of everything."""

    def kill(self) -> None:
        """End every computation now, whatever it does."""

    @property
    def slots(self) -> int:
        """How many searches of this service there is room for, those that run included."""

    @property
    def trouble(self) -> str | None:
        """Why no search can be computed now; None when they can."""

    def expect(
        self, task: SearchTask, search: SearchFunction, on_update: Callable[[Update], None]
    ) -> Computation:
        """A search that is to be computed; ``on_update`` is called in the event loop."""
