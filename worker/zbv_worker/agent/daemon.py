"""The node agent: one daemon per node, which offers it to a service and runs what it is given.

It imports no torch and holds no CUDA context; launchers and ranks are processes of their own. The service
is asked and told, never relied on: while it is away ranks go on, and the agent tries again, less and less
often. One thread waits for work or looks after the ranks; files travel beside it
(:mod:`zbv_worker.agent.folder_sync`).
"""

from __future__ import annotations

import logging
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from zbv_service.client import (
    AgentClient,
    AgentGone,
    ClientError,
    InvalidRequest,
    NodeWork,
    Overloaded,
    Registration,
)

from zbv_worker.agent.folder_sync import Courier
from zbv_worker.agent.generation import Generation, GenerationEnd
from zbv_worker.agent.heartbeat import SignOfLife
from zbv_worker.agent.policy import allowed, refusal_of
from zbv_worker.errors import InvalidRun
from zbv_worker.host import inventory
from zbv_worker.host.state_files import remove_old

T = TypeVar("T")

_WAIT_SECONDS = 20.0
"""How long the agent waits for work in one request."""
_REQUEST_SECONDS = 5.0
_POLL_SECONDS = 0.1
_BACK_OFF_SECONDS = (0.2, 5.0)
_LAST_FILES_SECONDS = 10.0
"""How long the end of a generation waits for its last traces and logs to be sent."""
_SWEEP_SECONDS = 3600.0
"""How often old folders are looked for."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AgentOptions:
    """How to be an agent.

    Attributes
    ----------
    allowed_models
        Patterns; see :func:`zbv_service.client.admission.is_model_allowed`. With none, every run is refused.
    checkpoint_directories
        Absolute paths, in and below which runs may keep checkpoints. With none, runs with checkpoints are
        refused.
    path
        Directories in which ranks look for the model's module.
    port
        Where ranks meet when this node is a run's first; None takes a free one.
    state_dir
        Keeps a folder per run and generation: logs, places, results.
    drain_seconds
        How long a run may go on after SIGTERM.
    keep_days
        How long the folder of an ended generation is kept.
    """

    server: str
    name: str
    address: str
    slots: int
    state_dir: Path
    allowed_models: tuple[str, ...] = ()
    checkpoint_directories: tuple[Path, ...] = ()
    path: tuple[Path, ...] = ()
    devices: tuple[str, ...] = ()
    port: int | None = None
    drain_seconds: float = 60.0
    keep_days: float = 7.0


class _Told(Exception):
    """Interrupts waiting: the agent was told to end."""


@dataclass
class _Ending:
    """SIGTERM and SIGINT: the first lets the run go on for a while, the second ends it."""

    drain_seconds: float
    deadline: float | None = None
    is_waiting: bool = field(default=False)

    def on_signal(self, *_: object) -> None:
        is_second = self.deadline is not None
        self.deadline = time.monotonic() + (0.0 if is_second else self.drain_seconds)
        if self.is_waiting:
            self.is_waiting = False
            raise _Told

    @property
    def is_asked_for(self) -> bool:
        return self.deadline is not None

    @property
    def is_overdue(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline


class Agent:
    """Offers this node until it is told to end.

    Call :meth:`run` from the main thread: the kernel ends the ranks with the thread that started them.
    """

    def __init__(self, options: AgentOptions):
        self._options = options
        self._id = ""
        self._port = options.port or inventory.free_port_at(options.address)
        self._heartbeat_seconds, self._timeout_seconds = 1.0, 15.0  # until the service says
        self._pause = _BACK_OFF_SECONDS[0]
        self._next_sweep = 0.0
        self._ending = _Ending(options.drain_seconds)
        self._sign_of_life = SignOfLife(options.state_dir, options.name, options.server)
        self._client = self._connect()
        self._waiting_client = AgentClient(
            options.server, timeout=_WAIT_SECONDS + _REQUEST_SECONDS, retries=0
        )

    def run(self) -> None:
        """Register, work, and deregister after SIGTERM or SIGINT.

        Raises
        ------
        InvalidRun
            When the service refuses the registration.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ending.on_signal)
        try:
            while not self._ending.is_asked_for:
                with suppress(_Told), self._until_lost():
                    if not self._id:
                        self._register()
                    self._sweep()
                    work = self._interruptibly(lambda: self._ask(self._wait_for_work))
                    if work is not None:
                        self._carry_out(work)
            with self._until_lost():
                self._drain()
        finally:
            self._client.close()
            self._waiting_client.close()

    def _register(self) -> None:
        options = self._options
        self._id = uuid.uuid4().hex  # known before the answer is: a registration that was cut off is undone
        body = {
            "id": self._id,
            "name": options.name,
            "address": options.address,
            "port": self._port,
            "slots": options.slots,
            "devices": list(options.devices),
            "versions": inventory.versions(),
            "allowed_models": list(options.allowed_models),
            "allows": allowed(options.allowed_models, options.checkpoint_directories),
        }
        while not self._ending.is_asked_for:
            found = self._interruptibly(lambda: self._ask(lambda: self._offer(body)))
            if found is not None:
                self._heartbeat_seconds = found.heartbeat_seconds
                self._timeout_seconds = found.timeout_seconds
                logger.info("agent %s (%s) is registered at %s", options.name, self._id, options.server)
                return

    def _offer(self, body: dict[str, Any]) -> Registration:
        """Register; without ``allows`` where the service is too old to know it."""
        try:
            return self._client.register_agent(body)
        except InvalidRequest as error:
            if "allows" not in body or not any(issue.pointer == "/allows" for issue in error.issues):
                raise
            del body["allows"]
            return self._client.register_agent(body)

    def _wait_for_work(self) -> NodeWork | None:
        fresh = self._options.port or inventory.free_port_at(self._options.address, self._port)
        if fresh != self._port:
            self._client.heartbeat(self._id, {"port": fresh})
            self._port = fresh
        return self._waiting_client.next_work(self._id, _WAIT_SECONDS)

    def _carry_out(self, work: NodeWork) -> None:
        logger.info("run %s, generation %d: node %d", work.run_id, work.generation, work.node_rank)
        options = self._options
        refusal = refusal_of(work, options.name, options.allowed_models, options.checkpoint_directories)
        if refusal is not None:
            logger.warning(refusal)
            self._report(work, GenerationEnd("failed", (_failure("refused", refusal),)))
            return
        folder = self._options.state_dir / work.run_id / str(work.generation)
        generation = Generation(
            work,
            options.server,
            options.address,
            folder,
            patience=self._timeout_seconds,
            path=options.path,
            allowed_models=options.allowed_models,
        )
        courier = Courier(self._id, work, generation.ranks, folder, self._connect)
        courier.start()
        try:
            self._look_after(generation, courier)
        finally:
            generation.kill()
            courier.finish()
        end = generation.end()
        if end.outcome == "stopped" and self._ending.is_overdue:
            end = GenerationEnd("failed", (_failure("agent-lost", self._farewell()),))
        logger.info("run %s, generation %d %s", work.run_id, work.generation, end.outcome)
        for failure in end.failures:
            logger.warning("%s", failure["detail"])
        self._see_off(generation, courier)
        self._report(work, end)

    def _look_after(self, generation: Generation, courier: Courier) -> None:
        """Follow the ranks to their end, with signs of life; raises :class:`AgentGone`."""
        next_beat, is_draining = 0.0, False
        while not generation.poll():
            if self._ending.is_overdue:
                generation.stop(failed_elsewhere=False)
            if self._ending.is_asked_for and not is_draining:
                is_draining = self._try(lambda: self._client.drain_agent(self._id))
            if time.monotonic() >= next_beat:
                self._try(lambda: self._beat(generation, courier))
                next_beat = time.monotonic() + self._heartbeat_seconds
            time.sleep(_POLL_SECONDS)

    def _beat(self, generation: Generation, courier: Courier) -> None:
        body = {"run_id": generation.work.run_id, "ranks": generation.places()}
        told = self._client.heartbeat(self._id, body)
        if told.stop:
            logger.info("stopping the ranks: %s", told.reason)
            generation.stop(failed_elsewhere=told.cause != "cancelled")
        elif generation.work.node_rank == 0:
            courier.fetch_plan(told.plan_id)

    def _see_off(self, generation: Generation, courier: Courier) -> None:
        """Wait for the last files to be sent, but not for long, and with signs of life."""
        until = time.monotonic() + _LAST_FILES_SECONDS
        while not courier.wait(min(self._heartbeat_seconds, 1.0)):
            if time.monotonic() > until or self._ending.is_overdue:
                return
            self._try(lambda: self._beat(generation, courier))

    def _connect(self) -> AgentClient:
        return AgentClient(self._options.server, timeout=_REQUEST_SECONDS, retries=0)

    def _sweep(self) -> None:
        """Remove what is older than it is to be kept, now and then."""
        if time.monotonic() < self._next_sweep:
            return
        self._next_sweep = time.monotonic() + _SWEEP_SECONDS
        for folder in remove_old(self._options.state_dir, self._options.keep_days, time.time()):
            logger.info("removed %s: nothing has changed in it for %g days", folder, self._options.keep_days)

    def _report(self, work: NodeWork, end: GenerationEnd) -> None:
        """Tell the service, however long it is away; raises :class:`AgentGone`."""
        body = {
            "run_id": work.run_id,
            "generation": work.generation,
            "outcome": end.outcome,
            "failures": list(end.failures),
        }
        while not self._try(lambda: self._client.report_end(self._id, body)):
            if self._ending.is_overdue:
                return  # the service will miss this agent
            self._back_off()

    def _farewell(self) -> str:
        return (
            f"agent {self._options.name} was told to end, and the run did not within "
            f"{self._options.drain_seconds:g} s. Give it longer (--drain-seconds), or drain it earlier."
        )

    def _drain(self) -> None:
        """Take no more work, finish what was given in the meantime, and deregister."""
        if not self._id:
            return
        self._try(lambda: self._client.drain_agent(self._id))
        work = self._ask(lambda: self._client.next_work(self._id, 0))
        if work is not None:
            self._carry_out(work)
        if self._try(lambda: self._client.remove_agent(self._id)):
            logger.info("agent %s has left", self._options.name)

    def _try(self, call: Callable[[], None]) -> bool:
        """Whether a call to the service succeeded; raises :class:`AgentGone`."""
        try:
            call()
        except AgentGone:
            raise
        except ClientError as error:
            self._no_answer(error)
            return False
        self._answered()
        return True

    def _ask(self, call: Callable[[], T]) -> T | None:
        """The service's answer, or None after a pause when it gives none.

        Raises
        ------
        AgentGone, InvalidRun
            When the service refuses.
        """
        try:
            answer = call()
        except AgentGone:
            raise
        except Overloaded as error:
            self._no_answer(error)
            self._back_off()
            return None
        except InvalidRequest as error:
            raise InvalidRun(f"{self._options.server} refused this agent: {error}") from error
        except ClientError as error:
            self._no_answer(error)
            self._back_off()
            return None
        self._answered()
        return answer

    def _answered(self) -> None:
        self._pause = _BACK_OFF_SECONDS[0]
        self._sign_of_life.give(answered=True)

    def _no_answer(self, error: ClientError) -> None:
        logger.warning("%s", error)
        self._sign_of_life.give(answered=False)

    def _back_off(self) -> None:
        time.sleep(self._pause)
        self._pause = min(_BACK_OFF_SECONDS[1], 2 * self._pause)

    def _interruptibly(self, call: Callable[[], T]) -> T:
        """A call that ends with :class:`_Told` when a signal comes: nothing is lost by it."""
        self._ending.is_waiting = True
        try:
            if self._ending.is_asked_for:
                raise _Told
            return call()
        finally:
            self._ending.is_waiting = False

    @contextmanager
    def _until_lost(self) -> Iterator[None]:
        """An agent that the service holds for lost forgets its id; its ranks are stopped by then."""
        try:
            yield
        except AgentGone as error:
            logger.warning("%s", error.detail)
            self._id = ""


def _failure(kind: str, detail: str) -> dict[str, Any]:
    return {"kind": kind, "rank": None, "detail": detail}
