"""The node agent: one daemon per node, which offers the node to a service and runs the work it is given.

It imports no torch and holds no CUDA context; launchers and ranks are separate processes. It does not depend
on the service being reachable: during an outage the ranks continue, and the agent retries with increasing
pauses. The main thread waits for work or monitors the ranks; another thread transfers files
(:mod:`zbv_worker.agent.folder_sync`).
"""

from __future__ import annotations

import logging
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

from zbv_service.client import (
    AgentClient,
    AgentGone,
    ClientError,
    InvalidRequest,
    NodeWork,
    Overloaded,
)

from zbv_worker.agent.folder_sync import FolderSync
from zbv_worker.agent.generation import Generation, GenerationEnd, failure
from zbv_worker.agent.heartbeat import Heartbeat, alone_in
from zbv_worker.agent.policy import AgentOptions
from zbv_worker.errors import InvalidRun
from zbv_worker.host import inventory
from zbv_worker.host.local_ranks import free_port
from zbv_worker.host.state_files import remove_old

T = TypeVar("T")

_WAIT_SECONDS = 20.0
"""How long one request waits for work."""
_REQUEST_SECONDS = 5.0
_POLL_SECONDS = 0.1
_BACK_OFF_SECONDS = (0.2, 5.0)
_LAST_FILES_SECONDS = 10.0
"""How long the end of a generation waits until its last traces and logs are sent."""
_SWEEP_SECONDS = 3600.0
"""How often to look for old folders."""

logger = logging.getLogger(__name__)


class _Interrupted(Exception):
    """Interrupts waiting: a signal asks the agent to end."""


@dataclass
class _Ending:
    """SIGTERM and SIGINT: the first lets the run continue for a while, the second ends it."""

    drain_seconds: float
    deadline: float | None = None
    is_waiting: bool = False

    def on_signal(self, *_: object) -> None:
        is_second = self.deadline is not None
        self.deadline = time.monotonic() + (0.0 if is_second else self.drain_seconds)
        if self.is_waiting:
            self.is_waiting = False
            raise _Interrupted

    @property
    def is_requested(self) -> bool:
        return self.deadline is not None

    @property
    def is_overdue(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline


class Agent:
    """Offers this node to a service until a signal ends it.

    Call :meth:`run` from the main thread: the kernel ends the ranks together with the thread that started
    them.
    """

    def __init__(self, options: AgentOptions):
        self._options = options
        self._id = ""
        self._port = options.port or free_port(options.address)
        self._heartbeat_seconds, self._timeout_seconds = 1.0, 15.0  # the service's answer replaces these
        self._pause = _BACK_OFF_SECONDS[0]
        self._next_sweep = 0.0
        self._ending = _Ending(options.drain_seconds)
        self._heartbeat = Heartbeat(options.state_dir, options.name, options.server)
        self._client = self._connect()
        self._waiting_client = AgentClient(
            options.server, timeout=_WAIT_SECONDS + _REQUEST_SECONDS, retries=0
        )

    def run(self) -> None:
        """Register, work, and deregister after SIGTERM or SIGINT.

        Raises
        ------
        InvalidRun
            If the service refuses the registration, or another agent uses the state directory.
        """
        try:
            with alone_in(self._options.state_dir):
                self._work()
        finally:
            self._client.close()
            self._waiting_client.close()

    def _work(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ending.on_signal)
        while not self._ending.is_requested:
            with suppress(_Interrupted), self._until_lost():
                if not self._id:
                    self._register()
                self._sweep()
                work = self._interruptibly(lambda: self._ask(self._wait_for_work))
                if work is not None:
                    self._carry_out(work)
        with self._until_lost():
            self._drain()

    def _register(self) -> None:
        options = self._options
        self._id = uuid.uuid4().hex  # chosen here, so that a registration without an answer can be undone
        body = {
            "id": self._id,
            "name": options.name,
            "address": options.address,
            "port": self._port,
            "slots": options.slots,
            "devices": list(options.devices),
            "versions": inventory.versions(),
            "allows": options.allows,
        }
        while not self._ending.is_requested:
            found = self._interruptibly(lambda: self._ask(lambda: self._client.register_agent(body)))
            if found is not None:
                self._heartbeat_seconds = found.heartbeat_seconds
                self._timeout_seconds = found.timeout_seconds
                logger.info("agent %s (%s) is registered at %s", options.name, self._id, options.server)
                return

    def _wait_for_work(self) -> NodeWork | None:
        fresh = self._options.port or free_port(self._options.address, self._port)
        if fresh != self._port:
            self._client.heartbeat(self._id, {"port": fresh})
            self._port = fresh
        return self._waiting_client.next_work(self._id, _WAIT_SECONDS)

    def _carry_out(self, work: NodeWork) -> None:
        logger.info("run %s, generation %d: node %d", work.run_id, work.generation, work.node_rank)
        refusal = self._options.refusal_of(work)
        if refusal is not None:
            logger.warning(refusal)
            self._report(work, GenerationEnd("failed", (failure("refused", refusal),)))
            return
        generation = Generation(work, self._options, patience=self._timeout_seconds)
        sync = FolderSync(self._id, work, generation.ranks, generation.folder, self._connect)
        sync.start()
        try:
            self._monitor(generation, sync)
        finally:
            generation.kill()
            sync.finish()
        end = generation.end()
        if end.outcome == "stopped" and self._ending.is_overdue:
            end = GenerationEnd("failed", (failure("agent-lost", self._farewell()),))
        logger.info("run %s, generation %d %s", work.run_id, work.generation, end.outcome)
        for each in end.failures:
            logger.warning("%s", each["detail"])
        self._finish_sync(generation, sync)
        self._report(work, end)

    def _monitor(self, generation: Generation, sync: FolderSync) -> None:
        """Monitor the ranks until they end, sending heartbeats; raises :class:`AgentGone`."""
        next_beat, is_draining = 0.0, False
        while not generation.poll():
            if self._ending.is_overdue:
                generation.stop(failed_elsewhere=False)
            if self._ending.is_requested and not is_draining:
                is_draining = self._try(lambda: self._client.drain_agent(self._id))
            if time.monotonic() >= next_beat:
                self._try(lambda: self._beat(generation, sync))
                next_beat = time.monotonic() + self._heartbeat_seconds
            time.sleep(_POLL_SECONDS)

    def _beat(self, generation: Generation, sync: FolderSync) -> None:
        body = {"run_id": generation.work.run_id, "ranks": generation.progress()}
        answer = self._client.heartbeat(self._id, body)
        if answer.stop:
            logger.info("stopping the ranks: %s", answer.reason)
            generation.stop(failed_elsewhere=answer.cause != "cancelled")
        elif generation.work.node_rank == 0:
            sync.fetch_plan(answer.plan_id)

    def _finish_sync(self, generation: Generation, sync: FolderSync) -> None:
        """Wait a limited time until the last files are sent, sending heartbeats."""
        until = time.monotonic() + _LAST_FILES_SECONDS
        self._try(lambda: self._beat(generation, sync))  # the last progress, also of a short run
        while not sync.wait(min(self._heartbeat_seconds, 1.0)):
            if time.monotonic() > until or self._ending.is_overdue:
                return
            self._try(lambda: self._beat(generation, sync))

    def _connect(self) -> AgentClient:
        return AgentClient(self._options.server, timeout=_REQUEST_SECONDS, retries=0)

    def _sweep(self) -> None:
        """Remove folders that are older than ``keep_days``, now and then."""
        if time.monotonic() < self._next_sweep:
            return
        self._next_sweep = time.monotonic() + _SWEEP_SECONDS
        for folder in remove_old(self._options.state_dir, self._options.keep_days, time.time()):
            logger.info("removed %s: nothing has changed in it for %g days", folder, self._options.keep_days)

    def _report(self, work: NodeWork, end: GenerationEnd) -> None:
        """Report the end of a generation, however long the service is away; raises :class:`AgentGone`."""
        body = {
            "run_id": work.run_id,
            "generation": work.generation,
            "outcome": end.outcome,
            "failures": list(end.failures),
        }
        while not self._try(lambda: self._client.report_end(self._id, body)):
            if self._ending.is_overdue:
                return  # the service will notice that this agent is missing
            self._back_off()

    def _farewell(self) -> str:
        return (
            f"agent {self._options.name} was asked to end, but the run did not end within "
            f"{self._options.drain_seconds:g} s. Raise --drain-seconds, or drain the agent earlier."
        )

    def _drain(self) -> None:
        """Take no more work, finish work that arrived in the meantime, and deregister."""
        if not self._id:
            return
        self._try(lambda: self._client.drain_agent(self._id))
        work = self._ask(lambda: self._client.next_work(self._id, 0))
        if work is not None:
            self._carry_out(work)
        if self._try(lambda: self._client.remove_agent(self._id)):
            logger.info("agent %s has left", self._options.name)

    def _try(self, call: Callable[[], None]) -> bool:
        """Call the service; returns whether it succeeded. Raises :class:`AgentGone`."""
        try:
            self._call(call)
        except AgentGone:
            raise
        except ClientError as error:
            logger.warning("%s", error)
            return False
        return True

    def _ask(self, call: Callable[[], T]) -> T | None:
        """Call the service; returns its answer, or None after a pause if there is none.

        Raises
        ------
        AgentGone, InvalidRun
            If the service refuses.
        """
        try:
            return self._call(call)
        except AgentGone:
            raise
        except ClientError as error:
            if isinstance(error, InvalidRequest) and not isinstance(error, Overloaded):
                raise InvalidRun(f"{self._options.server} refused this agent: {error}") from error
            logger.warning("%s", error)
            self._back_off()
            return None

    def _call(self, call: Callable[[], T]) -> T:
        """Call the service, and record in the heartbeat whether it answered."""
        try:
            answer = call()
        except ClientError as error:
            if not isinstance(error, AgentGone):
                self._heartbeat.write(answered=False)
            raise
        self._pause = _BACK_OFF_SECONDS[0]
        self._heartbeat.write(answered=True)
        return answer

    def _back_off(self) -> None:
        time.sleep(self._pause)
        self._pause = min(_BACK_OFF_SECONDS[1], 2 * self._pause)

    def _interruptibly(self, call: Callable[[], T]) -> T:
        """Make a call that a signal interrupts with :class:`_Interrupted`; use only if that loses nothing."""
        self._ending.is_waiting = True
        try:
            if self._ending.is_requested:
                raise _Interrupted
            return call()
        finally:
            self._ending.is_waiting = False

    @contextmanager
    def _until_lost(self) -> Iterator[None]:
        """Forget this agent's id if the service considers it lost; its ranks have been stopped by then."""
        try:
            yield
        except AgentGone as error:
            logger.warning("%s", error.detail)
            self._id = ""
