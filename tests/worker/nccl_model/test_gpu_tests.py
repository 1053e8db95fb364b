"""The GPU tests of streams and communicators, on the model of CUDA and NCCL.

They pass on the model as it is, and fail with the right message on a model with a fault.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import zbv_worker.check as worker_check
from gpu.test_communicators import (
    test_receives_that_wait_stop_nothing_and_can_be_aborted,
    test_torch_has_everything_that_the_worker_calls,
    test_works_timeouts_and_aborts_are_as_in_torchs_source,
)
from gpu.test_streams import (
    DELAY,
    test_copies_through_pinned_memory_neither_overtake_kernels_nor_stop_the_host,
    test_events_are_on_the_hosts_clock,
    test_events_pass_in_the_order_of_their_streams,
    test_streams_do_not_wait_for_a_busy_one,
)
from support.fake_nccl.cluster import Cluster, FakeRank
from support.fake_nccl.communicators import FakeGroup, FakeWork, NcclModes
from support.fake_nccl.device import DeviceModes, FakeEvent, FakeStream
from support.fake_nccl.simulation import Deadlock
from support.on_devices import Body, Run
from torch import Tensor
from zbv_worker.check import Gpu
from zbv_worker.transport.gloo_ends import Staging

__all__ = [
    "test_copies_through_pinned_memory_neither_overtake_kernels_nor_stop_the_host",
    "test_events_are_on_the_hosts_clock",
    "test_events_pass_in_the_order_of_their_streams",
    "test_receives_that_wait_stop_nothing_and_can_be_aborted",
    "test_streams_do_not_wait_for_a_busy_one",
    "test_torch_has_everything_that_the_worker_calls",
    "test_works_timeouts_and_aborts_are_as_in_torchs_source",
]
GpuTest = Callable[[Run], None]
QUERY, ELAPSED, OUTWARDS = FakeEvent.query, FakeEvent.elapsed_time, Staging.outwards


class ModelBench:
    """A rank of the model as a bench."""

    def __init__(self, here: FakeRank):
        self._here = here
        self.nccl, self.control = here.nccl, here.control
        self.gpu = Gpu(here.cuda, here.torch_device, here.clock, self._load_product)

    def _load_product(self) -> None:
        self._here.cuda.current_stream().launch("a cold product", 1e-3, lambda: None)

    def staging(self) -> Staging:
        return Staging(self._here.torch_device, self._here.cuda)

    def delay(self, stream: Any, milliseconds: float) -> None:
        stream.launch("delay", milliseconds / 1e3, lambda: None)


def on_model(device: DeviceModes, **more: Any) -> Run:
    """Runs a test on a model with faults."""

    def run(body: Body, ranks: int = 1) -> list[Any]:
        return Cluster(ranks, device=device, **more).run(lambda here: body(ModelBench(here)))

    return run


@pytest.fixture
def run() -> Run:
    """Runs a test on a device with as many hardware queues as the worker sets."""
    return on_model(DeviceModes(connections=32))


def _returns_late(self: Staging, tensor: Tensor) -> Any:
    copied = OUTWARDS(self, tensor)
    copied[1].synchronize()
    return copied


def _blocks(self: FakeWork) -> None:
    self._operation.stream.device.block_until_passed(self._end)


def _waits(self: FakeGroup) -> None:
    self._device.block_until_passed(self._device.current.record())


ORDER = test_events_pass_in_the_order_of_their_streams
TIMES = test_events_are_on_the_hosts_clock
COPIES = test_copies_through_pinned_memory_neither_overtake_kernels_nor_stop_the_host
WORKS = test_works_timeouts_and_aborts_are_as_in_torchs_source


def _unrecorded(self: FakeEvent) -> bool:
    return self.recording is not None and QUERY(self)


@pytest.mark.parametrize(
    ("test", "owner", "name", "fault", "message"),
    [
        (ORDER, FakeStream, "wait_event", lambda *_: None, "a stream that waits for an event ran on"),
        (ORDER, FakeEvent, "query", _unrecorded, "query() of an unrecorded event"),
        (ORDER, FakeEvent, "elapsed_time", lambda *_: DELAY, "an event that has not passed"),
        (TIMES, FakeEvent, "elapsed_time", lambda *of: 1.1 * ELAPSED(*of), "in which the host saw it pass"),
        (COPIES, Staging, "outwards", _returns_late, "the host waited for a kernel when it queued a copy"),
        (WORKS, FakeWork, "wait", _blocks, "the host waited in wait()"),
        (WORKS, FakeWork, "is_completed", lambda _: True, "is_completed() is True while"),
        (WORKS, FakeGroup, "abort", _waits, "while an operation could not run"),
    ],
)
def test_a_fault_is_noticed(
    run: Run, monkeypatch: pytest.MonkeyPatch, test: GpuTest, owner: type, name: str, fault: Any, message: str
) -> None:
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises(AssertionError, match=re.escape(message)):
        test(run)


def test_streams_that_share_hardware_queues_are_noticed() -> None:
    with pytest.raises(AssertionError, match="streams ended their work while another"):
        test_streams_do_not_wait_for_a_busy_one(on_model(DeviceModes(connections=4)))


@pytest.mark.parametrize(
    ("device", "more", "message"),
    [
        (DeviceModes(connections=32), {"nccl": NcclModes(abort_hangs=True)}, r"abort\(\) failed"),
        (DeviceModes(kernel_slots=worker_check.KERNELS - 1), {}, "the last of 6 receives did not arrive"),
    ],
)
def test_receives_that_wait_for_more_than_their_tensor_are_noticed(
    device: DeviceModes, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        test_receives_that_wait_stop_nothing_and_can_be_aborted(on_model(device, deadlines_pass=True, **more))


def test_a_product_that_waits_for_receives_hangs_until_its_process_is_ended() -> None:
    with pytest.raises(Deadlock, match="the first launch of a cold product waits"):
        test_receives_that_wait_stop_nothing_and_can_be_aborted(on_model(DeviceModes(lazy_loading=True)))


def test_a_receive_that_is_never_posted_is_noticed(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    """The communicator of a channel then loses one tensor."""
    receive, calls = FakeGroup.receive, list[Tensor]()

    def lost(self: FakeGroup, tensor: Tensor, peer: int) -> Any:
        calls.append(tensor)
        other = tensor.clone() if len(calls) == worker_check.KERNELS + 1 else tensor
        return receive(self, other, peer)

    monkeypatch.setattr(FakeGroup, "receive", lost)
    with pytest.raises(AssertionError, match="a receive got no tensor or a wrong one"):
        test_receives_that_wait_stop_nothing_and_can_be_aborted(run)
