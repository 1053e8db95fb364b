"""Calls in other processes: reports, requests to stop, errors, and the death of a process."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, Future, ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.context import ForkServerProcess
from queue import SimpleQueue
from typing import Any

import pytest
from support.processes import DEADLINE, is_alive, wait_until
from zbv_service.compute.child import Caller, Message, send
from zbv_service.compute.processes import IsolatedProcesses, ShutDown


@pytest.fixture
def processes() -> Iterator[IsolatedProcesses]:
    started = IsolatedProcesses()
    yield started
    started.kill()


def process_of(_argument: object) -> int:
    return os.getpid()


def count(until: int, caller: Caller) -> int:
    for number in range(until):
        caller.report(number)
    return os.getpid()


def wait_for_stop(_argument: object, caller: Caller) -> str:
    caller.report("begun")
    while not caller.is_stopped():
        time.sleep(0.01)
    return "stopped"


def is_stopped(_argument: object, caller: Caller) -> bool:
    time.sleep(0.1)  # a request that came late would arrive
    return caller.is_stopped()


def fail(_argument: object) -> None:
    raise KeyError("of the call")


class Unreadable(Exception):
    """Its pickle cannot be loaded."""

    def __init__(self, one: int, two: int):
        super().__init__(one + two)


def fail_unreadably(_argument: object) -> None:
    raise Unreadable(1, 2)


def unsendable(_argument: object) -> object:
    return threading.Lock()


def die(_argument: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_reports_arrive_in_order_before_the_result(processes: IsolatedProcesses) -> None:
    reports: list[int] = []
    assert processes.submit(count, 100, reports.append).result(DEADLINE) != os.getpid()
    assert reports == list(range(100))


def test_a_process_is_kept_for_the_next_call_and_replaced_if_it_dies(processes: IsolatedProcesses) -> None:
    first = processes.submit(process_of, None).result(DEADLINE)
    assert processes.submit(process_of, None).result(DEADLINE) == first
    assert processes.process_ids == [first]
    os.kill(first, signal.SIGKILL)
    dead(first)
    assert processes.submit(process_of, None).result(DEADLINE) != first


def dead(process_id: int) -> None:
    """Wait for the end of a process."""
    wait_until(lambda: not is_alive(process_id), "the end of the process")


def waiting(processes: IsolatedProcesses) -> Future[object]:
    """A call that has begun, and waits for the request to stop."""
    begun = threading.Event()
    call: Future[object] = processes.submit(wait_for_stop, None, lambda _: begun.set())
    assert begun.wait(DEADLINE)
    return call


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_call_can_be_asked_to_stop_at_any_time(processes: IsolatedProcesses, has_begun: bool) -> None:
    call = waiting(processes) if has_begun else processes.submit(wait_for_stop, None, lambda _: None)
    processes.stop(call)
    assert call.result(DEADLINE) == "stopped"
    processes.stop(call)  # it has ended
    assert processes.submit(is_stopped, None, lambda _: None).result(DEADLINE) is False


def test_a_request_to_stop_that_comes_late_does_not_stop_the_next_call() -> None:
    ours, theirs = Pipe()
    caller, calls = Caller(theirs), SimpleQueue[tuple[Message, Message] | None]()
    threading.Thread(target=caller.listen, args=(calls,), daemon=True).start()
    for kind, value in ((b"stop", b""), (b"function", (process_of, False)), (b"argument", None)):
        send(ours, kind, value)
    assert calls.get(timeout=DEADLINE) is not None
    assert not caller.is_stopped()
    ours.close()
    assert calls.get(timeout=DEADLINE) is None
    assert caller.is_stopped(), "nobody waits any more"


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        (fail, KeyError, "of the call"),
        (fail_unreadably, RuntimeError, "Unreadable: 3"),
        (unsendable, TypeError, "pickle"),
        (die, BrokenExecutor, "died"),
    ],
)
def test_an_error_fails_its_call_alone(
    processes: IsolatedProcesses, function: Any, kind: type[Exception], message: str
) -> None:
    other = waiting(processes)
    with pytest.raises(kind, match=message) as caught:
        processes.submit(function, None).result(DEADLINE)
    assert function is not fail or "in fail" in str(caught.value.__cause__), "the traceback of the process"
    processes.submit(process_of, None).result(DEADLINE)
    processes.kill_process_of(other)
    with pytest.raises(BrokenExecutor):
        other.result(DEADLINE)


def test_a_shutdown_asks_calls_to_stop_and_takes_no_more(processes: IsolatedProcesses) -> None:
    call = waiting(processes)
    (process_id,) = processes.process_ids
    processes.shutdown()
    assert call.result(DEADLINE) == "stopped"
    with pytest.raises(ShutDown):
        processes.submit(process_of, None)
    dead(process_id)


def test_a_process_that_starts_slowly_does_not_delay_the_end_of_others(
    processes: IsolatedProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    starting, may_start = threading.Event(), threading.Event()
    start = ForkServerProcess.start

    def start_slowly(process: ForkServerProcess) -> None:
        starting.set()
        assert may_start.wait(DEADLINE)
        start(process)

    monkeypatch.setattr(ForkServerProcess, "start", start_slowly)
    submitted = processes.submit(process_of, None)
    assert starting.wait(DEADLINE)
    with ThreadPoolExecutor(1) as thread:
        try:
            thread.submit(processes.kill_process_of, Future()).result(DEADLINE / 4)
        finally:
            may_start.set()
    assert submitted.result(DEADLINE) != os.getpid()
