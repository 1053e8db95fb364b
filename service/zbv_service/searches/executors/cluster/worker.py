"""The code that runs on the workers of a Dask cluster: searches, and answers to the service's polls.

A search leaves its newest report in a mailbox of its process. Four times a second the service calls
:func:`exchange`, which Dask runs while the tasks run; it fetches reports and delivers requests to stop. So
Dask's own connections are the only ones: there is no other port to open or address to advertise, and Dask's
encryption covers reports too.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType

import zbv_solver
from distributed import Worker, get_worker
from distributed.core import Status

from zbv_service.records.searches import Claim, Outcome, Update
from zbv_service.searches.executors.task import Compute

_PACKAGES = ("numpy", "numba", "ortools", "distributed")
"""Packages that a worker must have in the service's versions, for equal plans and a working connection."""


# Dask would log each of our polls, four times a second.
logging.getLogger("distributed.worker").addFilter(lambda record: record.args != ("exchange",))

LEAVE_SECONDS = 1.0
"""How long a worker that received SIGTERM waits for its searches to give up."""
LEAVING = {"action": "zbv-leaving", "status": "closing"}
"""The event with which such a worker tells the scheduler that its end is no crash."""
_PAUSE_SECONDS = 0.5

_FULL = 0.85
"""A worker that receives SIGTERM while it uses more than this share of its memory is out of memory: its nanny
ends it at 0.95 and gives no reason."""

_leaving = threading.Event()
_is_full = threading.Event()


class Abandoned(Exception):
    """A search stopped because nobody would receive its result."""


class Evicted(Abandoned):
    """A search stopped because its worker is ending."""


class OutOfMemory(Abandoned):
    """A search stopped because its worker is ending for lack of memory."""


@dataclass(frozen=True)
class Wanted:
    """The service's request to one of its searches."""

    stop: bool
    """Whether the search should return its best plan."""
    seen: int
    """The number of the newest report that the service has received."""


@dataclass(frozen=True)
class Found:
    """The answer about one search: the newest report if the service has not seen it, and its number."""

    number: int
    update: Update | None


@dataclass(frozen=True)
class Held:
    """The answer of a worker."""

    searches: dict[str, Found]
    """The searches of the polling service, by token."""
    others: int
    """The number of other running searches: of other services, and those that their service has given up."""
    is_leaving: bool
    """Whether the worker is ending and takes no more searches."""


class Mailbox:
    """Connects a running search to its service; a :class:`zbv_service.searches.executors.task.Reporter`.

    Parameters
    ----------
    patience
        The search gives up after this many seconds without contact to the service.
    """

    def __init__(self, service: str, patience: float):
        self.service = service
        self._patience = patience
        self._worker = get_worker()
        self._lock = threading.Lock()
        self._latest: Callable[[], Update] | None = None
        self._number = 0
        self._stopped = threading.Event()
        self._has_given_up = threading.Event()
        self._heard = time.monotonic()

    def report(self, make: Callable[[], Update]) -> None:
        """Leave a report, replacing the previous one."""
        with self._lock:
            self._latest, self._number = make, self._number + 1

    def is_stopped(self) -> bool:
        """Whether the search should return its best plan."""
        if self.is_abandoned:
            # Permanent: a service that comes back must not take a search that was cut short for complete.
            self._has_given_up.set()
        return self._stopped.is_set() or self._has_given_up.is_set()

    @property
    def is_abandoned(self) -> bool:
        """Whether nobody would receive the search's result."""
        is_silent = time.monotonic() - self._heard > self._patience
        return self._has_given_up.is_set() or self.is_worker_ending or is_silent

    @property
    def is_worker_ending(self) -> bool:
        """Whether its worker is ending."""
        return _leaving.is_set() or self._worker.status not in (Status.running, Status.paused)

    def hear(self, wanted: Wanted) -> None:
        """Take a request of the service, which also shows that the service is alive."""
        self._heard = time.monotonic()
        if wanted.stop:
            self._stopped.set()

    def abandon(self) -> None:
        """Give up a search that the service no longer wants: it presumed the search lost or moved it."""
        self._heard = float("-inf")

    def newest(self, seen: int) -> Found:
        """The newest report, if the service has not seen it yet."""
        with self._lock:
            latest, number = self._latest, self._number
        return Found(number, None if latest is None or number == seen else latest())


_mailboxes: dict[str, Mailbox] = {}


def run_on_worker(claim: Claim, compute: Compute, token: str, service: str, patience: float) -> Outcome:
    """Run a search in this worker's thread.

    Raises
    ------
    InfeasibleMemory, NoLayoutFits
        No plan or layout fits the memory limit.
    Abandoned
        Nobody would receive the result; the subclasses say why.
    """
    if _leaving.is_set():
        time.sleep(_PAUSE_SECONDS)  # until the scheduler knows; otherwise it would send the search here again
        raise Abandoned("its worker was about to end.")
    mailbox = _mailboxes[token] = Mailbox(service, patience)
    try:
        found = compute(claim, mailbox)
        if _is_full.is_set():
            raise OutOfMemory
        if mailbox.is_worker_ending:
            raise Evicted("its worker was stopped.")
        if mailbox.is_abandoned:
            raise Abandoned("its service was silent for too long.")
        return found
    finally:
        del _mailboxes[token]


async def exchange(service: str, wanted: Mapping[str, Wanted]) -> Held:
    """Deliver requests to this worker's searches, and return their reports; runs while they run."""
    here = dict(_mailboxes)
    mine = {token: mailbox for token, mailbox in here.items() if mailbox.service == service}
    searches: dict[str, Found] = {}
    for token, mailbox in mine.items():
        if token in wanted:
            mailbox.hear(wanted[token])
            # Packing the ranks of a large problem takes time, which must not block the worker's event loop.
            searches[token] = await asyncio.to_thread(mailbox.newest, wanted[token].seen)
        else:
            mailbox.abandon()
    return Held(searches, len(here) - len(searches), _leaving.is_set())


def welcome(dask_worker: Worker) -> dict[str, str]:
    """Prepare this worker, passed in by Dask, for its end; returns :func:`describe`.

    By default ``dask worker`` exits immediately on SIGTERM. That looks like a crash, and crashes count
    against the searches of the worker. With this, the worker first announces its end to the scheduler, and
    its searches have :data:`LEAVE_SECONDS` to give up. The announcement counts even if a search does not
    react in time. A worker that is out of memory announces nothing, because a search may be the reason.
    """
    original = signal.getsignal(signal.SIGTERM)
    is_ours = getattr(original, "__module__", None) == __name__
    if callable(original) and not is_ours and threading.current_thread() is threading.main_thread():
        loop = asyncio.get_running_loop()

        def leave(number: int, frame: FrameType | None) -> None:
            if _memory_in_use(dask_worker) > _FULL:
                _is_full.set()
            else:
                loop.call_soon_threadsafe(dask_worker.log_event, dask_worker.address, LEAVING)
            _leaving.set()
            loop.call_soon_threadsafe(loop.call_later, LEAVE_SECONDS, original, number, frame)

        signal.signal(signal.SIGTERM, leave)
    return describe()


def _memory_in_use(worker: Worker) -> float:
    """The share of its memory limit that a worker uses; 0 without a limit."""
    limit = worker.memory_manager.memory_limit
    return 0.0 if not limit else worker.monitor.get_process_memory() / limit


def describe() -> dict[str, str]:
    """The versions that must be equal in the service and its workers."""
    return {
        "zbv": zbv_solver.__version__,
        "zbv's code": _code(),
        "python": ".".join(platform.python_version_tuple()[:2]),
        **{name: _version(name) for name in _PACKAGES},
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


@cache
def _code() -> str:
    """A hash of the code, because version numbers do not distinguish two states of a checkout."""
    digest = hashlib.sha256()
    for root in (Path(zbv_solver.__file__).parent, Path(__file__).parents[2]):
        for path in sorted(root.rglob("*.py")):
            digest.update(os.fsencode(path.relative_to(root)) + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
