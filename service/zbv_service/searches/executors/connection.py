"""The search's end of its connection to the service on the same machine.

The search sends better plans and receives a request to stop; a closed connection means that the service is
gone. A separate thread sends only the newest report, so that the search never waits for the network.

Wire format: the task sends its token and a newline; then for each report a line of JSON and the packed ranks,
``size`` bytes of them by that JSON, null for none. The service sends ``stop`` and a newline.
"""

from __future__ import annotations

import json
import socket
import threading
from contextlib import closing, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

from zbv_service.records.plans import Refusal
from zbv_service.records.searches import Claim, Outcome
from zbv_service.searches.executors.task import SearchFunction, outcome_of, update_of

if TYPE_CHECKING:
    from zbv_models.layouts.progress import LayoutProgress
    from zbv_solver.search.incumbent import Progress

CONNECT_SECONDS = 10.0
SEND_SECONDS = 30.0
REPORT_SECONDS = 0.25
"""Minimal time between two reports of one search."""


def run_connected(claim: Claim, search: SearchFunction, address: tuple[str, int], token: str) -> Outcome:
    """Run a search that reports to an address; the token identifies the search.

    Raises
    ------
    InfeasibleMemory, NoLayoutFits
        No plan or layout fits the memory limit.
    OSError
        The service cannot be reached.
    """
    with closing(ServiceConnection(address, token)) as connection:
        return outcome_of(claim, search, connection)


class ServiceConnection:
    """A connection to the service; a :class:`zbv_service.searches.executors.task.Reporter`."""

    def __init__(self, address: tuple[str, int], token: str):
        self._socket = socket.create_connection(address, timeout=CONNECT_SECONDS)
        self._socket.settimeout(SEND_SECONDS)
        self._socket.sendall(token.encode() + b"\n")
        self._stopped = threading.Event()
        self._closed = threading.Event()
        self._fresh = threading.Event()
        self.refusal: Refusal | None = None
        self._latest: Progress | LayoutProgress | None = None
        self._threads = [
            threading.Thread(target=target, name=f"zbv-{target.__name__}", daemon=True)
            for target in (self._listen, self._send_reports)
        ]
        for thread in self._threads:
            thread.start()

    def report(self, progress: Progress | LayoutProgress) -> None:
        """Send a better plan or bound soon, unless a newer one replaces it. Never blocks."""
        self._latest = progress
        self._fresh.set()

    def is_stopped(self) -> bool:
        """Whether the search should return its best plan: on request, or because the service is gone."""
        return self._stopped.is_set()

    def close(self) -> None:
        """Close the connection."""
        self._closed.set()
        self._fresh.set()
        with suppress(OSError):  # the service may have closed it first
            self._socket.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(timeout=SEND_SECONDS)
        self._socket.close()

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                self._socket.recv(64)
            except TimeoutError:
                continue  # silence is the normal case
            except OSError:
                pass
            self._stopped.set()  # "stop" and a closed connection mean the same
            return

    def _send_reports(self) -> None:
        while True:
            self._fresh.wait()
            self._fresh.clear()
            if self._closed.is_set():
                return
            progress = self._latest
            if progress is not None:
                try:
                    self._socket.sendall(_report(progress, self.refusal))
                except OSError:
                    self._stopped.set()
                    return
            self._closed.wait(REPORT_SECONDS)


def _report(progress: Progress | LayoutProgress, refusal: Refusal | None) -> bytes:
    fields = asdict(update_of(progress, refusal))
    ranks = fields.pop("incumbent")
    header = json.dumps(fields | {"size": None if ranks is None else len(ranks)}, allow_nan=False)
    return header.encode() + b"\n" + bytes(ranks or b"")
