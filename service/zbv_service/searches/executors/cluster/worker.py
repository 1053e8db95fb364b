"""What runs on the workers of a Dask cluster: searches, and what the service asks about them.

A search leaves its newest report in a mailbox of its process. The service comes for it four times a second,
by a call that Dask carries out beside the tasks (:func:`exchange`), and brings requests to stop along. So
there is one way between service and workers, Dask's own: no port to open, no address to advertise, and
whatever encrypts Dask's connections encrypts reports as well.
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
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType

import zbv_solver
from distributed import Worker, get_worker
from distributed.core import Status

from zbv_service.records.searches import NewPlan, Refusal, Update
from zbv_service.searches.executors.task import ProgressLike, SearchFunction, SearchTask, compute, update_of

_PACKAGES = ("numpy", "numba", "ortools", "distributed")
"""Of which a worker must have the service's versions: plans depend on them, or the connection does."""


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    return record.args != ("exchange",)


# Dask logs every call of the kind that we make four times a second.
logging.getLogger("distributed.worker").addFilter(_is_worth_a_line)


LEAVE_SECONDS = 1.0
"""How long a worker that was told to end lets its searches say so."""
_PAUSE_SECONDS = 0.5

_FULL = 0.85
"""A worker that is told to end while so much of its memory is in use is told so because of that: its nanny
does so at 0.95, and cannot say why."""

_leaving = threading.Event()
_is_full = threading.Event()


class Abandoned(Exception):
    """A search stopped because what it returned would reach nobody."""


class Evicted(Abandoned):
    """A search stopped because its worker was told to end."""


class OutOfMemory(Abandoned):
    """A search stopped because its worker was told to end when it had no memory left."""


@dataclass(frozen=True)
class Wanted:
    """What a service wants of one of its searches.

    Attributes
    ----------
    stop
        Whether it is to return what it has.
    seen
        The number of the newest report that the service has.
    """

    stop: bool
    seen: int


@dataclass(frozen=True)
class Found:
    """What a service finds of one of its searches: the newest report if it is new, and its number."""

    number: int
    update: Update | None


@dataclass(frozen=True)
class Held:
    """A worker's answer.

    Attributes
    ----------
    searches
        Those of the service that asked, by token.
    others
        How many searches of other services run there.
    is_leaving
        Whether the worker was told to end, and takes no more.
    """

    searches: dict[str, Found]
    others: int
    is_leaving: bool


class Mailbox:
    """What ties a running search to its service; a :class:`zbv_service.searches.executors.task.Reporter`.

    Parameters
    ----------
    patience
        Seconds without a sign of the service after which the search gives up.
    """

    def __init__(self, service: str, patience: float):
        self.service = service
        self._patience = patience
        self._worker = get_worker()
        self._lock = threading.Lock()
        self.refusal: Refusal | None = None
        self._latest: ProgressLike | None = None
        self._number = 0
        self._stopped = threading.Event()
        self._has_given_up = threading.Event()
        self._heard = time.monotonic()

    def report(self, progress: ProgressLike) -> None:
        """Leave a report, in place of the one before."""
        with self._lock:
            self._latest, self._number = progress, self._number + 1

    def is_stopped(self) -> bool:
        """Whether the search should return what it has."""
        if self.is_abandoned:
            # For good: a service that is heard of again must not take what was cut short for the answer.
            self._has_given_up.set()
        return self._stopped.is_set() or self._has_given_up.is_set()

    @property
    def is_abandoned(self) -> bool:
        """Whether what the search returns would reach nobody."""
        is_silent = time.monotonic() - self._heard > self._patience
        return self._has_given_up.is_set() or self.is_worker_ending or is_silent

    @property
    def is_worker_ending(self) -> bool:
        """Whether its worker was told to end, or ends."""
        return _leaving.is_set() or self._worker.status not in (Status.running, Status.paused)

    def hear(self, wanted: Wanted) -> None:
        """The service was here."""
        self._heard = time.monotonic()
        if wanted.stop:
            self._stopped.set()

    def abandon(self) -> None:
        """The service does not want this search: it believes it lost, or gave it to another worker."""
        self._heard = float("-inf")

    def newest(self, seen: int) -> Found:
        """The newest report, if the service has not seen it."""
        with self._lock:
            latest, number = self._latest, self._number
        is_new = latest is not None and number != seen
        return Found(number, update_of(latest, self.refusal) if is_new and latest is not None else None)


_mailboxes: dict[str, Mailbox] = {}


def run_on_worker(
    task: SearchTask, search: SearchFunction, token: str, service: str, patience: float
) -> NewPlan:
    """Run a search in this worker's thread.

    Raises
    ------
    InfeasibleMemory
        When no plan fits.
    Abandoned
        When its result would reach nobody: see there for its kinds.
    """
    if _leaving.is_set():
        time.sleep(_PAUSE_SECONDS)  # until everybody knows: else it would be sent here again at once
        raise Abandoned("its worker was about to end.")
    mailbox = _mailboxes[token] = Mailbox(service, patience)
    try:
        plan = compute(task, search, mailbox)
        if _is_full.is_set():
            raise OutOfMemory
        if mailbox.is_worker_ending:
            raise Evicted("its worker was told to end.")
        if mailbox.is_abandoned:
            raise Abandoned("its service was silent for too long.")
        return plan
    finally:
        del _mailboxes[token]


async def exchange(service: str, wanted: Mapping[str, Wanted]) -> Held:
    """Take requests to this worker's searches, and their reports back; runs beside them."""
    here = dict(_mailboxes)
    mine = {token: mailbox for token, mailbox in here.items() if mailbox.service == service}
    searches: dict[str, Found] = {}
    for token, mailbox in mine.items():
        if token in wanted:
            mailbox.hear(wanted[token])
            # Packing the ranks of a large problem takes a while; the worker's loop must not wait for it.
            searches[token] = await asyncio.to_thread(mailbox.newest, wanted[token].seen)
        else:
            mailbox.abandon()
    return Held(searches, len(here) - len(mine), _leaving.is_set())


def welcome(dask_worker: Worker) -> dict[str, str]:
    """Have this worker, given by Dask, say when it is told to end, and what it is: see :func:`describe`.

    ``dask worker`` just goes when it is told to, as if it had died, which is put down to what it computed. So
    it is held back for a moment, in which its searches are given up.
    """
    original = signal.getsignal(signal.SIGTERM)
    is_ours = getattr(original, "__module__", None) == __name__
    if callable(original) and not is_ours and threading.current_thread() is threading.main_thread():
        loop = asyncio.get_running_loop()

        def leave(number: int, frame: FrameType | None) -> None:
            if _memory_in_use(dask_worker) > _FULL:
                _is_full.set()
            _leaving.set()
            loop.call_soon_threadsafe(loop.call_later, LEAVE_SECONDS, original, number, frame)

        signal.signal(signal.SIGTERM, leave)
    return describe()


def _memory_in_use(worker: Worker) -> float:
    """The share of its memory that a worker uses; 0 where it is not limited."""
    limit = worker.memory_manager.memory_limit
    return 0.0 if not limit else worker.monitor.get_process_memory() / limit


def describe() -> dict[str, str]:
    """The versions of whatever must be the same in the service and in its workers."""
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
    """A hash of the code that computes: versions alone do not tell two states of a checkout apart."""
    digest = hashlib.sha256()
    for root in (Path(zbv_solver.__file__).parent, Path(__file__).parents[2]):
        for path in sorted(root.rglob("*.py")):
            digest.update(os.fsencode(path.relative_to(root)) + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
