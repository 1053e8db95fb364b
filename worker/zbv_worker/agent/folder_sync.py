"""Exchanges files between a generation's folder and the service, in the background.

Uploads traces, events and logs; downloads a plan to change to. Since that may take as long as the network
takes, it has its own thread, so that heartbeats need not wait. What cannot be sent now is retried while the
generation runs; no failure here ends a run.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from zbv_service.client import AgentClient, AgentGone, ClientError, NodeWork, ServiceUnreachable
from zbv_solver.errors import InvalidInput
from zbv_solver.plans.reading import parse_orders, parse_plan_document

from zbv_worker.host.state_files import NEXT_PLAN, events_file, log_files, trace_file, write_json

LOG_BYTES = 256 * 1024
"""The size of a log's end to send; the service accepts no more."""
_PAUSE_SECONDS = 3.0

logger = logging.getLogger(__name__)


class FolderSync:
    """Synchronizes one generation's folder between :meth:`start` and :meth:`finish`.

    Parameters
    ----------
    ranks
        The ranks of this node, in order.
    connect
        Creates a client for this thread.
    pause
        Seconds between two scans of the folder.
    """

    def __init__(
        self,
        agent_id: str,
        work: NodeWork,
        ranks: Iterable[int],
        folder: Path,
        connect: Callable[[], AgentClient],
        pause: float = _PAUSE_SECONDS,
    ):
        self._agent_id = agent_id
        self._work = work
        self._ranks = tuple(ranks)
        self._folder = folder
        self._connect = connect
        self._pause = pause
        self._sent: dict[Path, tuple[int, int]] = {}
        self._wanted_plan: str | None = None
        self._known_plan = work.plan_id
        self._is_finishing = False
        self._wakes = threading.Event()
        name = f"zbv-sync-{work.run_id[:8]}-{work.generation}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start in the background."""
        self._thread.start()

    def fetch_plan(self, plan_id: str | None) -> None:
        """Download a plan into the folder, once; the run's first rank watches for it there."""
        if plan_id is not None and plan_id != self._wanted_plan:
            self._wanted_plan = plan_id
            self._wakes.set()

    def finish(self) -> None:
        """Send the remaining files and the logs, after the ranks have ended. See :meth:`wait`."""
        self._is_finishing = True
        self._wakes.set()

    def wait(self, seconds: float) -> bool:
        """Wait for the end; returns whether everything was sent or cannot be."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        client = self._connect()
        try:
            while not self._is_finishing:
                self._round(client)
                self._wakes.wait(self._pause)
                self._wakes.clear()
            self._round(client)
            self._send_logs(client)
        except AgentGone as error:
            logger.warning("traces and logs are not sent: %s", error.detail)
        finally:
            client.close()

    def _round(self, client: AgentClient) -> None:
        self._fetch(client)
        for rank in self._ranks:
            for path, put in (
                (trace_file(self._folder, rank), client.put_trace),
                (events_file(self._folder, rank), partial(self._put_events, client)),
            ):
                if not self._send_changed(path, partial(put, self._agent_id, self._work, rank)):
                    return  # the service is away; do not wait for it once per rank

    def _send_changed(self, path: Path, put: Callable[[bytes], None]) -> bool:
        """Send a rank's file if it has changed; returns False if the service did not answer."""
        try:
            found = path.stat()
            # Each writing makes a new file, and two of them may fall into one tick of the clock.
            changed = (found.st_ino, found.st_mtime_ns)
            if self._sent.get(path) == changed:
                return True
            text = path.read_bytes()
        except FileNotFoundError:
            return True  # nothing to send yet
        sent = self._try(lambda: put(text))
        if sent is not None:
            self._sent[path] = changed  # do not send a refused file again
        return sent is not None

    @staticmethod
    def _put_events(client: AgentClient, agent_id: str, work: NodeWork, rank: int, text: bytes) -> None:
        """Send events; a service that is too old for them answers as if the agent were gone."""
        try:
            client.put_events(agent_id, work, rank, text)
        except AgentGone as error:
            logger.warning("events of rank %d are not sent: %s", rank, error.detail)

    def _send_logs(self, client: AgentClient) -> None:
        for local_rank, rank in enumerate(self._ranks):
            files = log_files(self._folder, local_rank)
            text = b"".join(log_end(path, LOG_BYTES) for path in files)[-LOG_BYTES:]
            send = partial(client.put_log, self._agent_id, self._work, rank, text)
            if files and self._try(send) is None:
                return

    def _fetch(self, client: AgentClient) -> None:
        wanted = self._wanted_plan
        if wanted is None or wanted == self._known_plan:
            return
        began = time.monotonic()
        if self._try(lambda: self._download(client, wanted)):
            self._known_plan = wanted
            logger.info("plan %s downloaded after %.1f s", wanted, time.monotonic() - began)

    def _download(self, client: AgentClient, plan_id: str) -> None:
        document = client.plan_document(plan_id)
        try:
            parse_orders(parse_plan_document(document))  # also checks the plan's hash
        except InvalidInput as error:
            raise ClientError(f"the service's plan {plan_id} is not a valid plan: {error}") from error
        if document.get("plan_id") != plan_id:
            raise ClientError(f"requested plan {plan_id}, but received {document.get('plan_id')}.")
        write_json(self._folder / NEXT_PLAN, document)

    def _try(self, call: Callable[[], None]) -> bool | None:
        """Call the service; returns None if it did not answer, else whether it accepted.

        Raises :class:`AgentGone`.
        """
        try:
            call()
        except AgentGone:
            raise
        except ServiceUnreachable as error:
            logger.warning("%s", error)
            return None
        except (ClientError, OSError) as error:
            logger.warning("%s", error)
            return False
        return True


def log_end(path: Path, size: int) -> bytes:
    """The last bytes of a file, from the start of a line if possible."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, 2)
            file.seek(max(0, end - size))
            text = file.read(size)
    except OSError:
        return b""
    return text.partition(b"\n")[2] or text if end > size else text
