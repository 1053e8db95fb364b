"""Channels over NCCL on a small fake of its groups; the model in tests/worker/nccl_model runs whole plans."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.fake_cuda import FakeCuda
from support.manual_clock import ManualClock
from support.thread_transport import ThreadHub
from torch import Tensor
from zbv_worker.errors import InvalidRun
from zbv_worker.transport.channels import ChannelKey
from zbv_worker.transport.nccl import NcclTransport
from zbv_worker.transport.nccl_operations import Operations, greeting_order, kernels_at_once
from zbv_worker.transport.torch_api import GroupOptions
from zbv_worker.values.structure import TensorSpec

CPU = torch.device("cpu")
SPEC = TensorSpec((2,), torch.float32)
V4 = [ChannelKey(a, b) for a in range(4) for b in (a - 1, a + 1) if 0 <= b < 4]


class FakeWork:
    """Refuses what NCCL's work refuses; completes when the test says so, or on abort."""

    def __init__(self, group: FakeGroup, tensor: Tensor):
        self._group = group
        self.tensor = weakref.ref(tensor)
        self.is_done = False
        self.failure: str | None = None
        self.waits = 0

    def is_completed(self) -> bool:
        return self.is_done or self._group.is_aborted

    def wait(self, *timeout: object) -> bool:
        if timeout:
            raise AssertionError("with a timeout, NCCL blocks the host")
        self.waits += 1
        if self.failure is not None and not self._group.is_aborted:
            raise RuntimeError(self.failure)
        return True

    def is_success(self) -> bool:
        raise NotImplementedError("WorkNCCL::isSuccess() is deprecated")


class FailedDevice(FakeWork):
    """On a device on which a kernel has failed, whatever the operation was."""

    def wait(self, *timeout: object) -> bool:
        raise torch.AcceleratorError("CUDA error: the launch timed out and was terminated")


class FakeGroup:
    """Completes greetings at once, because their order is what a test looks at."""

    process_group = None

    def __init__(self, api: FakeNccl, ranks: Sequence[int], options: GroupOptions):
        self.ranks, self.options = ranks, options
        self._api = api
        self.works: list[FakeWork] = []
        self.timeout: timedelta | None = None
        self.is_aborted = False
        self.abort_takes = 0.0
        self.abort_fails = False

    def _issue(self, tensor: Tensor, what: str, peer: int | None) -> FakeWork:
        self._api.issued.append((what, *self.ranks))
        work = FakeWork(self, tensor)
        work.is_done = not self.works and self._api.connects
        self.works.append(work)
        if peer is not None and not 0 <= peer < len(self.ranks):
            raise RuntimeError("invalid peer")
        return work

    def send(self, tensor: Tensor, peer: int) -> FakeWork:
        return self._issue(tensor, "send", peer)

    def receive(self, tensor: Tensor, peer: int) -> FakeWork:
        return self._issue(tensor, "receive", peer)

    def all_reduce(self, tensor: Tensor) -> FakeWork:
        return self._issue(tensor, "sum", None)

    def all_gather(self, whole: Tensor, part: Tensor) -> FakeWork:
        return self._issue(part, "gather", None)

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> FakeWork:
        return self._issue(whole, "scatter", None)

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    def abort(self) -> None:
        assert self.timeout is not None, "an abort waits for the group's timeout, which is a day"
        if self.abort_fails:
            raise RuntimeError("abort failed")
        time.sleep(self.abort_takes)
        self.is_aborted = True


@dataclass
class FakeNccl:
    rank: int
    connects: bool = True
    others: int = 0
    groups: list[FakeGroup] = field(default_factory=list)
    created: list[tuple[int, ...]] = field(default_factory=list)
    issued: list[tuple[Any, ...]] = field(default_factory=list)

    def version(self) -> str:
        return "2.27.5"

    def streams_of_groups(self) -> int:
        return self.others

    def new_group(
        self, ranks: Sequence[int], timeout: timedelta, options: GroupOptions, name: str
    ) -> FakeGroup | None:
        assert timeout >= timedelta(hours=1), "NCCL's watchdog would fire before the worker's own deadlines"
        self.created.append(tuple(ranks))
        if self.rank not in ranks:
            return None
        self.groups.append(FakeGroup(self, ranks, options))
        return self.groups[-1]


class FakeControl:
    """Enough of a control plane for one rank alone."""

    def __init__(self, rank: int, pp_degree: int, replicas: int = 1):
        transport = ThreadHub(pp_degree, replicas).transport(rank)
        self.rank, self.layout = transport.rank, transport.layout
        self.ranks_on_host = 1
        self.is_closed = self.is_aborted = False
        self.sent: list[Tensor] = []
        self.receives: list[Tensor] = []
        self.answers = True

    def start_send(self, tensor: Tensor, peer: int) -> Callable[[float], None]:
        self.sent.append(tensor)
        return self._wait

    def start_receive(self, tensor: Tensor, peer: int) -> Callable[[float], None]:
        self.receives.append(tensor)
        return self._wait

    def _wait(self, timeout: float) -> None:
        if not self.answers:
            raise TimeoutError

    def abort(self) -> None:
        self.is_aborted = True

    def sum_over_ranks(self, values: Tensor, timeout: float) -> Tensor:
        return values * 10

    def close(self) -> None:
        self.is_closed = True


@dataclass
class Rank:
    api: FakeNccl
    clock: ManualClock
    transport: NcclTransport
    control: FakeControl

    def works(self, key: ChannelKey) -> list[FakeWork]:
        """The operations on a channel after its greeting."""
        own = [k for k in greeting_order(V4) if self.api.rank in k]
        assert len(own) == len(self.api.groups)
        return self.api.groups[own.index(key)].works[1:]


def rank_of(
    rank: int, pp_degree: int, replicas: int = 1, *, sums: bool = False, cuda: Any = None, **of_nccl: Any
) -> Rank:
    """A rank without channels."""
    api, clock, cuda = FakeNccl(rank, **of_nccl), ManualClock(), cuda or FakeCuda()
    control: Any = FakeControl(rank, pp_degree, replicas)
    transport = NcclTransport(control, CPU, 5.0, api=api, cuda=cuda, clock=clock, sums_over_ranks=sums)
    return Rank(api, clock, transport, control)


@pytest.fixture
def rank() -> Rank:
    """Rank 1 of a V of four."""
    return rank_of_v(1)


def rank_of_v(rank: int) -> Rank:
    made = rank_of(rank, 4)
    made.transport.open(V4, 5.0)
    return made


def sent(rank: Rank, tensor: Tensor | None = None, label: str = "1F0") -> Any:
    """The operation of a tensor that rank 1 sends to rank 2, if it passes through NCCL."""
    rank.transport.sender(ChannelKey(1, 2))(torch.ones(2) if tensor is None else tensor, label)
    return next(iter(rank.works(ChannelKey(1, 2))[-1:]), None)


def test_disjoint_neighbours_connect_at_the_same_time() -> None:
    order = greeting_order(V4)
    assert sorted(order) == sorted(V4)
    rounds: list[list[ChannelKey]] = [[]]
    for key in order:
        if any({*key} & {*other} for other in rounds[-1]):
            rounds.append([])
        rounds[-1].append(key)
    assert len(rounds) == 4, "a middle rank has four channels, so four rounds are the fewest"


def test_channels_have_few_thread_blocks_on_streams_of_high_priority(rank: Rank) -> None:
    assert {group.options for group in rank.api.groups} == {GroupOptions(4, is_high_priority=True)}


def test_a_channel_that_does_not_connect_is_named_within_the_timeout() -> None:
    rank = rank_of(1, 4, connects=False)
    with pytest.raises(TimeoutError, match="the channel 0→1 did not connect"):
        rank.transport.open([ChannelKey(0, 1)], 5.0)
    assert 5.0 <= rank.clock.now() < 6.0


@pytest.mark.parametrize(("position", "kernels"), [(0, 2), (1, 4), (3, 2)])
def test_a_device_runs_one_waiting_kernel_per_communicator(position: int, kernels: int) -> None:
    assert kernels_at_once(V4, position) == kernels == len(rank_of_v(position).api.groups)
    assert kernels_at_once(V4, position, 2, sums_over_ranks=True) == kernels + 2


@pytest.mark.parametrize(
    ("others", "peers", "most", "message"),
    [
        (0, 15, 28, "rank 0 needs 30 NCCL communicators; must be at most 28"),
        (3, 13, 25, "needs 26 NCCL communicators, and the process has 3 other groups"),
    ],
)
def test_more_communicators_than_streams_are_refused_before_any_is_created(
    others: int, peers: int, most: int, message: str
) -> None:
    """Streams of the user's groups count."""
    rank = rank_of(0, 16, others=others)
    keys = [ChannelKey(*ends) for peer in range(1, peers + 1) for ends in ((0, peer), (peer, 0))]
    with pytest.raises(InvalidRun, match=message):
        rank.transport.open(keys, 5.0)
    assert rank.api.created == []
    rank.transport.open(keys[:most], 5.0)


def test_a_sent_tensor_is_kept_until_its_send_is_complete(rank: Rank) -> None:
    work = sent(rank)
    rank.transport.check()
    assert work.tensor() is not None
    work.is_done = True
    rank.clock.pause(1)
    rank.transport.check()
    assert work.tensor() is None
    assert work.waits == 1


def test_a_send_that_fails_later_is_found_by_the_next_check(rank: Rank) -> None:
    work = sent(rank)
    work.failure, work.is_done = "NCCL error: remote process exited\nmore", True
    rank.clock.pause(1)
    with pytest.raises(ConnectionError, match=r"sending 1F0 to rank 2: NCCL error: remote process exited$"):
        rank.transport.check()


def test_a_failed_kernel_of_this_rank_is_not_blamed_on_the_peer(rank: Rank) -> None:
    pending = rank.transport.receiver(ChannelKey(0, 1))(SPEC)
    sent(rank)
    for key in (ChannelKey(0, 1), ChannelKey(1, 2)):
        (work,) = rank.works(key)
        work.__class__, work.is_done = FailedDevice, True
    rank.clock.pause(1)
    for use in (rank.transport.check, lambda: pending.on_stream(1.0), lambda: pending.wait(1.0)):
        with pytest.raises(torch.AcceleratorError, match="the launch timed out"):
            use()


def test_looks_at_sends_are_rare(rank: Rank) -> None:
    work = sent(rank)
    work.is_completed = Mock(return_value=False)
    for _ in range(100):
        rank.transport.check()
    work.is_completed.assert_called_once()


def test_a_flush_names_the_tensor_that_was_not_taken(rank: Rank) -> None:
    sent(rank, label="1F7")
    with pytest.raises(TimeoutError, match="rank 2 did not take 1F7"):
        rank.transport.flush(3.0)
    assert 3.0 <= rank.clock.now() < 4.0


def test_a_receive_orders_the_stream_and_only_a_wait_blocks_the_host(rank: Rank) -> None:
    receive = rank.transport.receiver(ChannelKey(0, 1))
    pending = receive(SPEC)
    before = rank.clock.now()
    pending.on_stream(7.0)
    (work,) = rank.works(ChannelKey(0, 1))
    assert (work.waits, rank.clock.now()) == (1, before)
    with pytest.raises(TimeoutError, match="nothing arrived"):
        receive(SPEC).wait(7.0)
    assert 7.0 <= rank.clock.now() - before < 8.0


def test_through_the_host_no_transfer_is_queued_on_the_device(rank: Rank) -> None:
    greeted = len(rank.api.issued)
    rank.transport.through_host(True, 5.0)
    first, second = (rank.transport.receiver(ChannelKey(0, 1))(SPEC) for _ in range(2))
    for content, place in zip((1.0, 2.0), rank.control.receives, strict=True):
        place.fill_(content)
    assert [second.on_stream(1.0).tolist(), first.wait(1.0).tolist()] == [[2.0, 2.0], [1.0, 1.0]]
    sent(rank, torch.full((2,), 3.0))
    assert [tensor.tolist() for tensor in rank.control.sent] == [[3.0, 3.0]]
    assert len(rank.api.issued) == greeted
    rank.transport.through_host(False, 5.0)
    sent(rank)
    assert (len(rank.api.issued), len(rank.control.sent)) == (greeted + 1, 1)


def test_what_was_sent_through_the_host_and_not_taken_is_named(rank: Rank) -> None:
    rank.transport.through_host(True, 5.0)
    sent(rank, label="1F7")
    rank.control.answers = False
    with pytest.raises(TimeoutError, match="rank 2 did not take 1F7"):
        rank.transport.flush(3.0)
    with pytest.raises(TimeoutError, match="rank 2 did not take 1F7"):
        rank.transport.through_host(False, 3.0)


def test_an_abort_ends_waits_for_tensors_that_pass_through_the_host(rank: Rank) -> None:
    rank.transport.through_host(True, 5.0)
    rank.transport.abort(1.0)
    assert rank.control.is_aborted


def test_tensors_that_passed_through_the_host_stay_allocated_if_there_is_memory() -> None:
    free = 1 << 20
    operations = Operations(ManualClock(), lambda: free)
    tensors = [torch.ones(1024) for _ in range(4)]
    alive = [weakref.ref(tensor) for tensor in tensors]
    for memory in (1 << 20, 1 << 20, 1 << 14, 1 << 20):
        free = memory
        operations.hold(tensors.pop(0))
    assert [each() is not None for each in alive] == [False, False, True, True]
    operations.release()
    assert not any(each() is not None for each in alive)


def test_another_thread_may_not_issue_operations(rank: Rank) -> None:
    with (
        ThreadPoolExecutor(1, "loader") as pool,
        pytest.raises(RuntimeError, match="thread 'loader_0' issued an NCCL operation"),
    ):
        pool.submit(sent, rank).result(60)
    assert rank.works(ChannelKey(1, 2)) == []


def test_after_an_abort_nothing_counts_as_complete(rank: Rank) -> None:
    pending = rank.transport.receiver(ChannelKey(0, 1))(SPEC)
    sent(rank)
    assert rank.transport.abort(5.0)
    assert all(group.is_aborted for group in rank.api.groups)
    uses: list[Callable[[], object]] = [
        lambda: pending.wait(5.0),
        lambda: pending.on_stream(5.0),
        rank.transport.check,
        lambda: rank.transport.flush(5.0),
        lambda: sent(rank),
        lambda: rank.transport.receiver(ChannelKey(0, 1))(SPEC),
    ]
    for use in uses:
        with pytest.raises(ConnectionError, match="this rank has aborted its communicators"):
            use()
    assert not rank.control.is_closed, "an abort must not destroy process groups"


def test_aborts_run_at_the_same_time_and_one_that_hangs_does_not_hold_the_rank(rank: Rank) -> None:
    rank.api.groups[0].abort_takes, rank.api.groups[1].abort_fails = 3600.0, True
    assert not rank.transport.abort(0.2)
    deadline = time.monotonic() + 60  # a busy machine may start a thread late
    while not all(group.is_aborted for group in rank.api.groups[2:]) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert [group.is_aborted for group in rank.api.groups] == [False, False, True, True]
    assert {group.timeout for group in rank.api.groups} == {timedelta(seconds=0.2)}


def test_sums_of_device_tensors_do_not_wait_on_the_host() -> None:
    rank = rank_of(2, 2, replicas=2, sums=True)
    api, transport = rank.api, rank.transport
    assert api.created == [(0, 1), (2, 3), (0, 1, 2, 3)]
    tensor = torch.ones(2)
    transport.sum_over_replicas(tensor).wait(5.0)
    total = transport.sum_over_ranks(tensor, 5.0)
    transport.gather_over_replicas(torch.ones(1), torch.ones(2)).wait(5.0)
    transport.sum_parts_over_replicas(torch.ones(2), torch.ones(1)).wait(5.0)
    replicas, everyone = api.groups
    assert [work.waits for work in replicas.works + everyone.works] == [1] * 6
    assert not any(work.is_done for work in replicas.works[1:] + everyone.works[1:])
    assert total is not tensor
    assert rank.clock.now() == 0


def test_without_its_communicator_a_sum_over_ranks_goes_through_the_host(rank: Rank) -> None:
    assert rank.transport.sum_over_ranks(torch.ones(1), 5.0).tolist() == [10]


def test_the_start_reports_version_options_memory_and_environment(capsys: pytest.CaptureFixture[str]) -> None:
    cuda = FakeCuda()
    free = iter([2**30, 2**30 - 300 * 2**20])
    cuda.mem_get_info = lambda device: (next(free), 2**30)  # type: ignore[method-assign]
    transport = rank_of(0, 2, cuda=cuda).transport
    transport.open([ChannelKey(0, 1), ChannelKey(1, 0)], 5.0)
    (line,) = capsys.readouterr().err.splitlines()
    said = "2 communicators (0→1, 1→0), 300 MiB of GPU memory; channels use at most 4 thread blocks"
    assert line.startswith(f"rank 0: NCCL 2.27.5: {said}")
    environment = {"NCCL_SOCKET_IFNAME": "eth0", "HOME": "/root", "CUDA_LAUNCH_BLOCKING": "0"}
    variables = transport.described(environment).rpartition("; ")[2].split(", ")
    assert {"CUDA_LAUNCH_BLOCKING=0", "NCCL_SOCKET_IFNAME=eth0"} < set(variables)
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING=0" in variables, "as in the worker's own groups"
    assert not any(each.startswith("HOME") for each in variables)
