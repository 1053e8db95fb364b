"""Posted receives: what waits on the host, and what on the GPU's stream."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from support.fake_cuda import FakeCuda
from zbv_worker.transport.gloo_ends import HostReceive, StagedReceive, Staging

CPU = torch.device("cpu")


class FakeWork:
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
    work, buffer = FakeWork(), torch.zeros(1)
    receive = HostReceive(work, buffer)
    assert receive.wait(7) is buffer
    assert receive.on_stream(8) is buffer
    assert work.waits == [7, 8]
    with pytest.raises(ConnectionError, match="receive: Connection closed"):
        HostReceive(FakeWork(failure="Connection closed by peer [127.0.0.1]:1"), buffer).wait(7)


def test_a_staged_copy_waits_for_the_last_reader_of_its_buffer() -> None:
    cuda = FakeCuda()
    staging = Staging(CPU, cuda, pin=False)
    buffer, seen = torch.zeros(2), []

    def read() -> bool:
        seen.append(buffer.tolist())
        return True

    running = cuda.compute.hang()
    cuda.compute.queue.append(read)  # reads the old content
    receive = StagedReceive(FakeWork(), torch.ones(2), buffer, staging.here(), staging)
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
    StagedReceive(FakeWork(), torch.ones(2), buffer, staging.here(), staging).on_stream(7)
    cuda.compute.queue.append(lambda: not seen.append(buffer.tolist()))  # type: ignore[func-returns-value]
    cuda.settle()
    assert seen == []
    copying()
    cuda.settle()
    assert seen == [[1, 1]]


def test_the_host_can_wait_until_a_staged_tensor_is_on_the_gpu() -> None:
    cuda = FakeCuda()
    staging = Staging(CPU, cuda, pin=False)
    buffer = torch.zeros(2)
    assert StagedReceive(FakeWork(), torch.ones(2), buffer, staging.here(), staging).wait(7).tolist() == [
        1,
        1,
    ]
    with pytest.raises(TimeoutError):
        StagedReceive(FakeWork(failure="Timed out"), torch.ones(2), buffer, staging.here(), staging).wait(7)
