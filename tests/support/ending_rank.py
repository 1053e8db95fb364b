"""A process that ends because of an error; it says what it does, in order."""

from __future__ import annotations

import sys
import threading
import time
from typing import cast
from unittest.mock import Mock

from zbv_solver.plans.orders import Action
from zbv_worker.errors import InvalidRun, PeerLost
from zbv_worker.execution.binding import overdue
from zbv_worker.execution.rank_plan import Instruction
from zbv_worker.execution.timeline import Overdue, Patience, QueuedWork
from zbv_worker.failures import failures
from zbv_worker.failures.blame import Doing, FailureNotes
from zbv_worker.failures.failures import Failures, OwnProcess
from zbv_worker.failures.progress import Progress, attach_progress
from zbv_worker.transport.connected import ConnectedTransport, ControlPlane
from zbv_worker.transport.gloo_control import GlooControl
from zbv_worker.transport.world import Layout, World

from support.processes import DEADLINE


class Said:
    """Notes, transport and control plane of rank 1 of 3, which say how they are used."""

    rank, layout = 1, Layout(3)

    def __init__(self, *, hangs: bool = False):
        self._hangs = hangs
        self._notes: dict[str, str] = {}

    def post(self, name: str, value: str) -> None:
        self._notes[name] = value
        if name == "failure":
            say(f"published {value}")

    def posted(self, name: str) -> str | None:
        return self._notes.get(name)

    def close(self) -> None:
        time.sleep(3600)

    def abort(self, timeout: float | None = None) -> bool:
        if timeout is None:  # that of the control plane
            return True
        say("aborted")
        if self._hangs:
            time.sleep(3600)
        return True


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def report(error: BaseException) -> int:
    say(f"reported {error}")
    return 2 if isinstance(error, InvalidRun) else 1


def end_late() -> None:
    """Rank 0 of two fails; rank 1 takes its time before it asks the store in rank 0 for the reason."""
    vars(failures)["ABORT_SECONDS"] = DEADLINE
    control = GlooControl(World.from_environment(), 60.0)
    process = OwnProcess(lambda error: time.sleep(3 * control.rank), report)
    rank = Failures(control, 60.0, 60.0, process=process)
    rank.watch()
    with rank.watched("step 4"):
        if control.rank == 0:
            raise InvalidRun("wrong")
        control.hear(0, 60.0)


def main(what: str) -> None:
    if what == "late":
        return end_late()
    said = Said(hangs=what == "hangs")

    def record(error: BaseException) -> None:
        if what == "unrecorded":
            raise OSError("no space left")
        say(f"recorded {error}")

    control = cast(ControlPlane, said)
    rank = Failures(control, 60.0, 60.0, process=OwnProcess(record, report))
    rank.connected(cast(ConnectedTransport, said))
    if what in ("hangs", "closes"):
        failures.LEAVE_SECONDS = 1.0
        threading.Thread(target=time.sleep, args=(3600,)).start()  # Python would wait for it at an exit
    if what == "closes":
        rank.close_transport()
    rank.watch(said)
    with rank.watched("step 4"):
        raise error_of(what, said)


def error_of(what: str, said: Said) -> Exception:
    if what == "peer":
        FailureNotes(said, 0).sign(1, Doing("step 4, 0F1"))
        error: Exception = PeerLost("rank 1 waited at 1F1.")
        attach_progress(error, Progress(4, "1F1", 0))
        return error
    if what == "update":
        FailureNotes(said, 2).sign(1, Doing("step 4, 0F1"))
        work = QueuedWork(0, 4, None, Mock(), Mock(), Patience(60.0))
        error = overdue(Overdue(work, started=True), 1)
        attach_progress(error, Progress(4))
        return error
    if what == "gather":
        FailureNotes(said, 2).sign(1, Doing("step 4, 0F1"))
        action = Instruction(Action(0, "F", 1), None, None, split=True, completes_stage=False, peer=None)
        work = QueuedWork(0, 4, action, Mock(), Mock(), Patience(60.0))
        error = overdue(Overdue(work, started=True), 1, [2])
        attach_progress(error, Progress(4, "0F1"))
        return error
    return InvalidRun("wrong")


if __name__ == "__main__":
    main(sys.argv[1])
