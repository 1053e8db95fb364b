"""Work that Ctrl-C stops before it is passed on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from threading import Event

import pytest
from zbv_solver.commands.interrupt import interruptible


@pytest.mark.parametrize("delay", [0, 0.3])
def test_ctrl_c_stops_the_work_before_it_is_passed_on(delay: float) -> None:
    stopped = Event()

    def work(cancelled: Callable[[], bool]) -> None:
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGINT)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not stopped.wait(0.01):
            if cancelled():
                stopped.set()

    with pytest.raises(KeyboardInterrupt):
        interruptible(work)
    assert stopped.is_set()


def test_interruptible_work_returns_and_raises_as_usual() -> None:
    assert interruptible(lambda cancelled: cancelled()) is False
    with pytest.raises(ZeroDivisionError):
        interruptible(lambda _: 1 // 0)
