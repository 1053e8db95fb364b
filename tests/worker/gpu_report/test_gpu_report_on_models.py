"""The GPU report's measurements of streams and communicators, on the model of CUDA and NCCL.

Every measurement passes its lines on the model as it is, and fails the right line on a model with a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from support.fake_nccl.cluster import Cluster, FakeRank
from support.fake_nccl.communicators import FakeGroup, FakeWork, NcclModes
from support.fake_nccl.cuda import FakeCuda
from support.fake_nccl.device import DeviceModes, FakeEvent, FakeStream
from support.fake_nccl.simulation import Deadlock, FakeClock
from torch import Tensor
from zbv_worker.gpu_report import communicator, streams
from zbv_worker.gpu_report.check import Line, ReportOptions
from zbv_worker.model.spec import ModelSpec
from zbv_worker.transport.staging import Staging

OPTIONS = ReportOptions(ModelSpec("zbv_worker.models.gpt:gpt"))
QUERY = FakeEvent.query
PLAIN = DeviceModes()


class ModelBench:
    """A rank of the model as a bench."""

    def __init__(self, here: FakeRank):
        self.cuda: FakeCuda = here.cuda
        self.clock: FakeClock = here.clock
        self.device = here.torch_device

    def delay(self, stream: Any, milliseconds: float) -> None:
        """See :class:`streams.Bench`."""
        stream.launch("delay", milliseconds / 1e3, lambda: None)

    def fill(self, stream: Any, tensor: Tensor, value: float) -> None:
        """See :class:`streams.Bench`."""
        with self.cuda.stream(stream):
            tensor.fill_(value)

    def copy(self, stream: Any, source: Tensor, target: Tensor) -> None:
        """See :class:`streams.Bench`."""
        with self.cuda.stream(stream):
            target.copy_(source)

    def load_product(self) -> None:
        """See :class:`streams.Bench`."""
        self.cuda.current_stream().launch("a cold product", 1e-3, lambda: None)


def failures(lines: Iterable[Line]) -> list[str]:
    return [line.what for line in lines if line.verdict == "fail"]


def on_one(measure: Callable[[FakeRank], Any], modes: DeviceModes = PLAIN) -> Any:
    return Cluster(1, device=modes).run(measure)


def events(modes: DeviceModes = PLAIN) -> list[str]:
    answers = on_one(lambda here: streams.events(ModelBench(here)), modes)
    return failures(streams.judge_events(OPTIONS, answers))


def test_events_of_the_model_pass() -> None:
    assert events() == []


def test_streams_that_share_hardware_queues_are_found() -> None:
    (line,) = events(DeviceModes(connections=4))
    assert "while another stream is busy" in line


@pytest.mark.parametrize(
    ("owner", "name", "fault", "line"),
    [
        (FakeStream, "wait_event", lambda self, event: None, "a stream that waits for an event"),
        (
            FakeEvent,
            "query",
            lambda self: self.recording is not None and QUERY(self),
            "query() of an event that was never",
        ),
        (FakeEvent, "elapsed_time", lambda self, later: streams.DELAY, "before it has passed"),
    ],
)
def test_faults_of_events_are_found(
    owner: type, name: str, fault: Any, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, fault)
    assert any(line in found for found in events())


def clock_errors() -> list[str]:
    answers = on_one(lambda here: streams.clock_errors(ModelBench(here)))
    return failures(streams.judge_clock(OPTIONS, answers))


def test_marks_lie_where_the_host_saw_them() -> None:
    assert clock_errors() == []


def test_events_that_count_other_milliseconds_than_the_host_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = FakeEvent.elapsed_time
    monkeypatch.setattr(FakeEvent, "elapsed_time", lambda self, later: 1.1 * right(self, later))
    (line,) = clock_errors()
    assert "marks on the host's clock" in line


def copies() -> list[str]:
    def measure(here: FakeRank) -> dict[str, Any]:
        return streams.copies(ModelBench(here), Staging(here.torch_device, here.cuda))

    return failures(streams.judge_copies(OPTIONS, on_one(measure)))


def test_copies_of_the_staging_pass() -> None:
    assert copies() == []


def test_a_copy_that_makes_the_host_wait_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    outwards = Staging.outwards

    def waiting(self: Staging, tensor: Tensor) -> Any:
        found = outwards(self, tensor)
        found[1].synchronize()
        return found

    monkeypatch.setattr(Staging, "outwards", waiting)
    (line,) = copies()
    assert "without waiting" in line


def one_rank() -> list[str]:
    def measure(here: FakeRank) -> dict[str, Any]:
        return communicator.one_rank(here.nccl, ModelBench(here))

    return failures(communicator.judge_one_rank(OPTIONS, on_one(measure)))


def test_a_communicator_of_one_rank_passes() -> None:
    assert one_rank() == []


@pytest.mark.parametrize(
    ("name", "fault", "line"),
    [
        (
            "wait",
            lambda self: self._operation.stream.device.block_until_passed(self._end),
            "the host goes on",
        ),
        ("is_completed", lambda self: True, "False while the operation waits"),
    ],
)
def test_works_that_behave_otherwise_are_found(
    name: str, fault: Any, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeWork, name, fault)
    assert any(line in found for found in one_rank())


def test_an_abort_that_waits_for_the_device_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def abort(self: FakeGroup) -> None:
        self._device.block_until_passed(self._device.current.record())

    monkeypatch.setattr(FakeGroup, "abort", abort)
    (line,) = one_rank()
    assert "abort() while an operation cannot run" in line


def receives(modes: DeviceModes, **more: Any) -> list[str]:
    def measure(here: FakeRank) -> dict[str, Any]:
        return communicator.receives(here.nccl, here.control, ModelBench(here), timeout=100.0)

    return failures(communicator.judge_receives(OPTIONS, Cluster(2, device=modes, **more).run(measure)))


def test_waiting_receives_stop_nothing_on_a_device_with_enough_queues() -> None:
    assert receives(DeviceModes(connections=32)) == []


def test_an_abort_that_does_not_end_a_waiting_receive_is_found() -> None:
    (line,) = receives(DeviceModes(connections=32), nccl=NcclModes(abort_hangs=True), deadlines_pass=True)
    assert "abort() while a receive waits forever" in line


def test_too_few_kernels_at_once_are_found() -> None:
    too_few = DeviceModes(kernel_slots=communicator.KERNELS - 1)
    assert any("the last of" in line for line in receives(too_few, deadlines_pass=True))


def test_a_product_that_waits_for_receives_hangs_until_the_check_is_ended() -> None:
    with pytest.raises(Deadlock, match="the first launch of a cold product waits"):
        receives(DeviceModes(lazy_loading=True))
