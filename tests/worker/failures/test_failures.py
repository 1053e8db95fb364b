"""The failures of a pipeline in the user's process: the watch over other ranks, and a limit for closing."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from worker.failures.test_blame import Store
from zbv_worker.errors import ChannelTimeout, PeerLost, WorkerError
from zbv_worker.failures import failures as module
from zbv_worker.failures.blame import Doing, FailureNotes, Loss
from zbv_worker.failures.failures import Failures
from zbv_worker.failures.liveness import Liveness
from zbv_worker.transport.world import Layout


class Control:
    """The control plane of a wire."""

    def __init__(self, wire: Wire):
        self.rank, self.layout, self.post, self.posted = wire.rank, wire.layout, wire.post, wire.posted

    def abort(self) -> None:
        pass


class Wire(Store):
    """A transport whose operations wait until it is aborted, as those of NCCL for a lost peer."""

    rank, layout = 0, Layout(2)

    def __init__(self) -> None:
        super().__init__()
        self.aborted, self.may_close = threading.Event(), threading.Event()
        self.may_close.set()
        self.can_abort = True
        self.control = Control(self)

    def abort(self, timeout: float) -> bool:
        self.aborted.set()
        return self.can_abort

    def close(self) -> None:
        self.may_close.wait()

    def receive(self) -> None:
        if not self.aborted.wait(60):
            pytest.fail("nobody has aborted the receive")
        raise ConnectionError("aborted")


@pytest.fixture
def wire() -> Iterator[Any]:
    made = Wire()
    yield made
    made.may_close.set()


def failures_of(wire: Any) -> Failures:
    failures = Failures(wire.control, 60, 60)
    failures.connected(wire)
    return failures


def test_a_rank_that_waits_learns_from_the_watch_that_another_rank_has_failed(wire: Any) -> None:
    failures = failures_of(wire)
    failures.watch(wire)
    threading.Timer(0.2, FailureNotes(wire, 1).publish, [Loss(1, "out of memory")]).start()
    with pytest.raises(PeerLost, match="rank 1 lost: out of memory"), failures.watched("step 3"):
        wire.receive()
    assert failures.has_failed


def test_a_loss_between_calls_is_raised_by_the_next_call(wire: Any) -> None:
    failures = failures_of(wire)
    failures.watch(wire)
    FailureNotes(wire, 1).publish(Loss(1, "out of memory"))
    assert wire.aborted.wait(60)
    with pytest.raises(PeerLost, match="out of memory"), failures.watched("step 3"):
        pytest.fail("the call ran although a rank is lost")
    with pytest.raises(WorkerError, match="out of memory"), failures.watched("step 4"):
        pytest.fail("the call ran although the pipeline has failed")


def test_a_store_that_ends_with_a_rank_that_has_left_is_no_loss(wire: Any) -> None:
    failures = failures_of(wire)
    failures.watch(wire)
    wire.is_gone = True
    assert not wire.aborted.wait(2)
    with failures.watched("step 3"):
        pass
    failures.stop_watching()


def test_connections_that_do_not_close_do_not_block_the_error(
    wire: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "LEAVE_SECONDS", 0.2)
    monkeypatch.setattr(atexit, "register", lambda function: None)  # this process is the test's
    wire.may_close.clear()
    late = threading.Timer(60, wire.may_close.set)  # without a limit, closing ends then
    late.daemon = True
    late.start()
    failures = failures_of(wire)
    ended = []
    failures.on_end = lambda: ended.append(True)
    with pytest.raises(ValueError, match="mine"), failures.watched("step 3"):
        raise ValueError("mine")
    late.cancel()
    assert ended
    assert "did not close" in capsys.readouterr().err


def test_connections_that_cannot_be_aborted_are_not_closed(
    wire: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limits: list[Any] = []
    monkeypatch.setattr(atexit, "register", limits.append)
    wire.can_abort = False
    failures = failures_of(wire)
    closed: list[bool] = []
    monkeypatch.setattr(wire, "close", lambda: closed.append(True))
    with pytest.raises(ValueError, match="mine"), failures.watched("step 3"):
        raise ValueError("mine")
    assert not closed
    assert limits, "the interpreter's exit has a limit"
    assert "stay open" in capsys.readouterr().err


def test_a_wait_for_a_rank_that_waits_itself_blames_the_last_of_the_chain(wire: Any) -> None:
    failures = failures_of(wire)
    failures.watch(wire)
    wire.alive[1] = Doing("step 3, 1F0")
    failures.progress.waiting_for = 1
    with pytest.raises(ChannelTimeout) as raised, failures.watched("step 3"):
        raise TimeoutError("no activation arrived")
    expected = "rank 1 lost: it is alive, but does not get beyond step 3, 1F0. "
    assert str(raised.value) == f"{expected}rank 0, step 3: no activation arrived."


def test_a_rank_that_stops_watching_gives_no_sign_of_life_any_more(wire: Any) -> None:
    liveness = Liveness(0.005)
    failures = Failures(wire.control, 60, 60, liveness=liveness)
    failures.watch(wire)
    failures.stop_watching()
    last = wire.notes["sign/0"]
    later = threading.Event()

    def beat() -> bool:
        later.set()
        return True

    liveness.add(beat)
    assert later.wait(60)
    assert wire.notes["sign/0"] == last == '"ended"'
    liveness.stop()
