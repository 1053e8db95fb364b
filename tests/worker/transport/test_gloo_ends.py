"""The ends of gloo channels: lifetime of sent tensors, order, errors, and what waits for received ones."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from support.fake_cuda import FakeCuda
from torch import Tensor
from zbv_worker.transport import gloo_ends
from zbv_worker.transport.gloo_ends import (
    GroupWire,
    HostReceive,
    SendFailures,
    StagedReceive,
    Staging,
    ThreadSender,
)

CPU = torch.device("cpu")


class FakeWork:
    def __init__(self) -> None:
        self.taken = threading.Event()
        self.failure: Exception | None = None

    def wait(self, timeout: timedelta = timedelta()) -> None:
        assert self.taken.wait(60)
        if self.failure is not None:
            raise self.failure


class FakeGroup:
    """Records the content of every tensor at the start of its send."""

    def __init__(self) -> None:
        self.works: list[FakeWork] = []
        self.contents: list[object] = []
        self.plain: list[bool] = []
        self.broken = False

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> FakeWork:
        (tensor,) = tensors
        if self.broken:
            raise RuntimeError("Connection closed by peer")
        self.contents.append(tensor.tolist())
        self.plain.append(tensor.is_contiguous() and not tensor.requires_grad)
        self.works.append(FakeWork())
        return self.works[-1]


@pytest.fixture
def wire() -> FakeGroup:
    return FakeGroup()


@pytest.fixture
def failures() -> SendFailures:
    return SendFailures()


@pytest.fixture
def sender(wire: Any, failures: SendFailures) -> Iterator[ThreadSender]:
    """It sends to rank 3, which takes all at the end."""
    made = ThreadSender(3, GroupWire(wire, 0), failures, None)
    yield made
    for work in wire.works:
        work.taken.set()
    made.close()


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return condition()


def test_a_tensor_is_kept_alive_until_received_and_no_longer(wire: FakeGroup, sender: ThreadSender) -> None:
    tensors = [torch.full((2,), float(j)) for j in range(2)]
    alive = [weakref.ref(tensor) for tensor in tensors]
    while tensors:
        sender.send(tensors.pop(0), "0F0")
    wire.works[0].taken.set()
    assert eventually(lambda: alive[0]() is None)
    assert alive[1]() is not None
    wire.works[1].taken.set()
    assert eventually(lambda: not any(each() is not None for each in alive))
    sender.flush(time.monotonic() + 20)


def test_large_tensors_are_released_and_flushed_at_once(
    wire: FakeGroup, sender: ThreadSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gloo_ends, "_LOOK_SECONDS", 3600.0)
    large = torch.zeros(gloo_ends._WAKE_BYTES // 4)
    alive = weakref.ref(large)
    sender.send(large, "0F0")
    del large
    wire.works[0].taken.set()
    assert eventually(lambda: alive() is None)
    sender.send(torch.zeros(1), "0F1")
    wire.works[1].taken.set()
    sender.flush(time.monotonic() + 20)


def test_sent_tensors_are_contiguous_and_have_no_graph(wire: FakeGroup, sender: ThreadSender) -> None:
    sender.send(torch.arange(6.0, requires_grad=True).reshape(2, 3).t(), "0F0")
    assert wire.contents == [[[0, 3], [1, 4], [2, 5]]]
    assert wire.plain == [True]


def test_a_flush_names_tensors_that_the_peer_did_not_receive(sender: ThreadSender) -> None:
    sender.send(torch.zeros(1), "0F7")
    with pytest.raises(TimeoutError, match="rank 3 did not take 0F7"):
        sender.flush(time.monotonic() + 0.05)


def test_a_send_that_fails_later_is_found_by_the_next_check(
    wire: FakeGroup, sender: ThreadSender, failures: SendFailures
) -> None:
    sender.send(torch.zeros(1), "0F7")
    wire.works[0].failure = RuntimeError("Connection reset by peer\nException raised from …")
    wire.works[0].taken.set()
    assert eventually(lambda: failures.first is not None)
    with pytest.raises(ConnectionError, match=r"sending 0F7 to rank 3.*Connection reset by peer"):
        failures.check()
    with pytest.raises(ConnectionError):
        sender.flush(time.monotonic() + 20)


def test_a_failed_kernel_of_this_rank_is_found_by_the_next_check_and_not_blamed_on_the_peer(
    wire: FakeGroup, sender: ThreadSender, failures: SendFailures
) -> None:
    sender.send(torch.ones(1), "5F1")
    wire.works[0].failure = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    wire.works[0].taken.set()
    assert eventually(lambda: failures.first is not None)
    with pytest.raises(torch.AcceleratorError):
        failures.check()


def test_a_send_that_cannot_start_raises_an_error(wire: FakeGroup, sender: ThreadSender) -> None:
    wire.broken = True
    with pytest.raises(ConnectionError, match="sending 0F7 to rank 3: Connection closed by peer"):
        sender.send(torch.zeros(1), "0F7")


def test_the_first_failure_is_reported(failures: SendFailures) -> None:
    failures.check()
    failures.add(ConnectionError("first"))
    failures.add(ConnectionError("second"))
    with pytest.raises(ConnectionError, match="first"):
        failures.check()


def test_a_gpu_tensor_is_sent_after_its_copy_in_order(
    wire: Any, failures: SendFailures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gloo_ends, "_is_on_gpu", lambda tensor: tensor.numel() > 1)
    cuda = FakeCuda()
    sender = ThreadSender(3, GroupWire(wire, 0), failures, Staging(CPU, cuda, pin=False))
    done = cuda.compute.hang()
    tensor = torch.zeros(2)

    def kernel() -> bool:
        tensor.fill_(5)
        return True

    cuda.compute.queue.append(kernel)
    sender.send(torch.ones(1), "header")
    sender.send(tensor, "0F0")
    assert eventually(lambda: wire.contents == [[1.0]])
    time.sleep(0.02)
    assert wire.contents == [[1.0]]
    done()
    wire.works[0].taken.set()
    assert eventually(lambda: len(wire.works) == 2)
    assert wire.contents == [[1.0], [5.0, 5.0]]
    wire.works[1].taken.set()
    sender.flush(time.monotonic() + 20)
    sender.close()


class FakeWait:
    """Records the timeouts of its waits."""

    def __init__(self, failure: str | None = None):
        self._failure = failure
        self.waits: list[float | None] = []

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.waits.append(None if timeout is None else timeout.total_seconds())
        if self._failure is not None:
            raise RuntimeError(self._failure)
        return True


def test_on_the_cpu_both_methods_wait_for_the_tensor() -> None:
    work, buffer = FakeWait(), torch.zeros(1)
    receive = HostReceive(work, buffer)
    assert receive.wait(7) is buffer
    assert receive.on_stream(8) is buffer
    assert work.waits == [7, 8]
    with pytest.raises(ConnectionError, match="receive: Connection closed"):
        HostReceive(FakeWait(failure="Connection closed by peer [127.0.0.1]:1"), buffer).wait(7)


def staged(staging: Staging, buffer: Tensor, failure: str | None = None) -> StagedReceive:
    """A receive of ones."""
    return StagedReceive(FakeWait(failure), torch.ones(2), buffer, staging.here(), staging)


def test_a_staged_copy_waits_for_the_last_reader_of_its_buffer() -> None:
    cuda = FakeCuda()
    staging = Staging(CPU, cuda, pin=False)
    buffer, seen = torch.zeros(2), []

    def read() -> bool:
        seen.append(buffer.tolist())
        return True

    running = cuda.compute.hang()
    cuda.compute.queue.append(read)  # reads the old content
    receive = staged(staging, buffer)
    later = cuda.compute.hang()  # queued after the receive was posted, so the copy does not wait for it
    assert receive.on_stream(7) is buffer
    cuda.compute.queue.append(read)
    cuda.settle()
    assert seen == []
    assert buffer.tolist() == [0, 0]
    running()
    cuda.settle()
    assert seen == [[0, 0]]
    assert buffer.tolist() == [1, 1]
    later()
    cuda.settle()
    assert seen == [[0, 0], [1, 1]]


def test_compute_waits_for_a_staged_tensor() -> None:
    cuda = FakeCuda()
    staging = Staging(CPU, cuda, pin=False)
    copying = staging._inwards.hang()  # type: ignore[attr-defined]  # of the fake
    buffer, seen = torch.zeros(2), []
    staged(staging, buffer).on_stream(7)
    cuda.compute.queue.append(lambda: not seen.append(buffer.tolist()))  # type: ignore[func-returns-value]
    cuda.settle()
    assert seen == []
    copying()
    cuda.settle()
    assert seen == [[1, 1]]


def test_the_host_can_wait_until_a_staged_tensor_is_on_the_gpu() -> None:
    staging = Staging(CPU, FakeCuda(), pin=False)
    assert staged(staging, torch.zeros(2)).wait(7).tolist() == [1, 1]
    with pytest.raises(TimeoutError):
        staged(staging, torch.zeros(2), "Timed out").wait(7)
