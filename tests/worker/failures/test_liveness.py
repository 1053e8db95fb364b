"""The duties of a rank's thread, and what a rank says while it starts."""

from __future__ import annotations

import threading
import time

import pytest
from support.manual_clock import ManualClock
from zbv_worker.failures.liveness import SAY_SECONDS, Liveness, StartWatch


def test_each_duty_goes_on_until_it_ends_or_is_removed() -> None:
    liveness, calls = Liveness(0.005), list[str]()
    twice = threading.Event()

    def short() -> bool:
        calls.append("short")
        return False

    def long() -> bool:
        calls.append("long")
        if calls.count("long") == 2:
            twice.set()
        return True

    liveness.add(short, long)
    assert twice.wait(60)
    liveness.remove(long)
    before = calls.count("long")
    time.sleep(0.05)
    assert calls.count("long") == before
    assert calls.count("short") == 1
    liveness.stop()
    assert not liveness._thread.is_alive()


def test_a_duty_does_not_run_any_more_once_it_is_removed() -> None:
    """A rank that leaves must not give a sign of life after it has said that it leaves."""
    liveness, is_running, said = Liveness(0.005), threading.Event(), list[bool]()

    def slow() -> bool:
        is_running.set()
        time.sleep(0.2)
        is_running.clear()
        said.append(True)
        return True

    liveness.add(slow)
    assert is_running.wait(60)
    liveness.remove(slow)
    before = len(said)
    assert not is_running.is_set()
    time.sleep(0.05)
    assert len(said) == before >= 1
    liveness.stop()


def test_a_starting_rank_says_what_it_waits_for(capsys: pytest.CaptureFixture[str]) -> None:
    clock, late = ManualClock(), list[str]()
    start = StartWatch(3, 50.0, lambda: "connecting to the other ranks", late.append, clock)
    assert start.look()
    clock.pause(SAY_SECONDS)
    assert start.look()
    clock.pause(20.0)
    assert start.look(), "the wait itself would have given a better error"
    clock.pause(15.0)
    assert not start.look()
    (text,) = late
    assert text.startswith("rank 3 did not start within 50 s: connecting to the other ranks. ")
    assert capsys.readouterr().err == "rank 3: connecting to the other ranks (30 s since its start)\n"


def test_a_rank_that_has_started_says_nothing_more(capsys: pytest.CaptureFixture[str]) -> None:
    clock = ManualClock()
    start = StartWatch(3, 50.0, lambda: "connecting", lambda text: None, clock)
    start.done()
    clock.pause(100.0)
    assert not start.look()
    assert capsys.readouterr().err == ""
