"""The models of CUDA and NCCL wait and refuse where CUDA and ProcessGroupNCCL do.

Only what tests of plans and of mistakes on the models would not notice.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from support.fake_nccl.cluster import Cluster, FakeRank
from support.fake_nccl.communicators import FakeGroup, FakeWork, NcclModes
from support.fake_nccl.device import DeviceModes, FakeStream
from support.fake_nccl.simulation import Deadlock, ModelError
from zbv_worker.transport.torch_api import GroupOptions

DAY = timedelta(days=1)
Program = Callable[[FakeRank, FakeGroup], Any]


def alone(program: Callable[[FakeRank], Any], **modes: Any) -> Any:
    """Run a program on one rank."""
    return Cluster(1, device=DeviceModes(**modes)).run(program)[0]


def slow(here: FakeRank, reads: Any = (), writes: Any = (), seconds: float = 1.0, name: str = "slow") -> None:
    """Queue a long kernel that fills what it writes with 9."""
    raws = [here.device.memory.raw(tensor) for tensor in writes]

    def run() -> None:
        for raw in raws:
            raw.fill_(9)

    here.device.current.launch(name, seconds, run, reads, writes)


def group_of(here: FakeRank) -> Any:
    return here.nccl.new_group([0, 1], DAY, GroupOptions(), "pair")


def test_the_33rd_stream_of_a_priority_is_the_first() -> None:
    def main(here: FakeRank) -> tuple[list[FakeStream], FakeStream]:
        return [here.cuda.Stream() for _ in range(33)], here.cuda.Stream(priority=-1)

    normal, high = alone(main)
    assert len(set(normal)) == 32
    assert normal[32] is normal[0]
    assert high not in normal


def test_two_writers_without_an_order_are_noticed() -> None:
    """Tests of mistakes show a writer and a reader without one."""

    def main(here: FakeRank, *, ordered: bool) -> None:
        tensor, other = torch.zeros(2, device="cuda"), here.cuda.Stream()
        other.wait_stream(here.cuda.current_stream())
        slow(here, writes=(tensor,), name="first")
        if ordered:
            other.wait_stream(here.cuda.current_stream())
        with here.cuda.stream(other):
            slow(here, writes=(tensor,), name="second")
        here.cuda.current_stream().wait_stream(other)

    alone(lambda here: main(here, ordered=True))
    with pytest.raises(ModelError, match="second overwrites memory that first may not have written yet"):
        alone(lambda here: main(here, ordered=False))


def test_memory_must_not_be_freed_while_another_stream_uses_it() -> None:
    def main(here: FakeRank) -> None:
        tensor, other = torch.zeros(2, device="cuda"), here.cuda.Stream()
        other.wait_stream(here.cuda.current_stream())
        with here.cuda.stream(other):
            slow(here, reads=(tensor,), name="reader")
        del tensor
        here.cuda.synchronize()

    with pytest.raises(ModelError, match="freed, and may be reused, while reader still uses it"):
        alone(main)


def test_the_memory_of_a_send_is_available_only_after_the_send() -> None:
    def main(here: FakeRank) -> list[int]:
        group = group_of(here)
        tensor = torch.zeros(2, device="cuda")
        if here.rank == 1:
            here.control.hear(0, 60)
            group.receive(tensor, 0)
            return []
        work = group.send(tensor, 1) if here.control.tell(1, 0, 60) is None else None
        del tensor
        held = here.device.memory.device.live
        while work is not None and not work.is_completed():
            here.clock.pause(1e-4)
        return [held, here.device.memory.device.live]

    assert Cluster(2).run(main)[0] == [8, 0]


def test_the_host_waits_for_what_it_reads() -> None:
    def main(here: FakeRank) -> tuple[float, float]:
        tensor = torch.zeros((), device="cuda")
        slow(here, writes=(tensor,))
        return float(tensor), here.clock.now()

    value, now = alone(main)
    assert value == 9
    assert now >= 1


def test_an_asynchronous_copy_must_not_be_read_before_it_is_finished() -> None:
    def main(here: FakeRank, *, synchronized: bool) -> list[float]:
        tensor = torch.zeros(2, device="cuda")
        slow(here, writes=(tensor,))
        copied = tensor.to("cpu", non_blocking=True)
        if synchronized:
            here.cuda.synchronize()
        return copied.tolist()

    assert alone(lambda here: main(here, synchronized=True)) == [9.0, 9.0]
    with pytest.raises(ModelError, match="the host reads memory that copy may not have written yet"):
        alone(lambda here: main(here, synchronized=False))


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (lambda here: slow(here, reads=(torch.zeros(2),)), "uses host memory"),
        (lambda here: torch.zeros(2, device="cuda").erfinv(), "does not know erfinv"),
    ],
)
def test_host_memory_and_others_are_refused(program: Callable[[FakeRank], object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        alone(program)


def test_tensors_are_on_their_device() -> None:
    def main(here: FakeRank) -> tuple[Any, ...]:
        tensor = torch.zeros(2, device=here.torch_device)
        moved = torch.ones(2).pin_memory().to(here.torch_device, non_blocking=True)
        return str(tensor.device), tensor.is_cuda, str(moved.device), str(moved.cpu().device), moved.tolist()

    assert alone(main) == ("cuda:0", True, "cuda:0", "cpu", [1.0, 1.0])


def test_full_multiprocessors_delay_a_kernel_of_nccl_until_compute_ends() -> None:
    def main(here: FakeRank) -> float:
        group = group_of(here)
        tensor = torch.zeros(2, device="cuda")
        other = here.cuda.Stream()
        with here.cuda.stream(other):
            slow(here, seconds=1.0)
        work = group.send(tensor, 1) if here.rank == 0 else group.receive(tensor, 0)
        while not work.is_completed():
            here.clock.pause(1e-3)
        return here.clock.now()

    assert Cluster(2).run(main)[0] < 0.5
    assert Cluster(2, device=DeviceModes(sms_full=True)).run(main)[0] > 0.9


def on_two(first: Program, second: Program, **modes: Any) -> list[Any]:
    """Run a program on each of two ranks, which have one group."""
    return Cluster(2, **modes).run(lambda here: (first if here.rank == 0 else second)(here, group_of(here)))


def filled(value: float, size: int = 4) -> torch.Tensor:
    return torch.full((size,), float(value), device="cuda")


def sends(here: FakeRank, group: FakeGroup) -> None:
    group.send(filled(7), 1)


def receives(here: FakeRank, group: FakeGroup, size: int = 4) -> Any:
    buffer = torch.empty(size, device="cuda")
    group.receive(buffer, 0).wait()
    return buffer.tolist()


def nothing(here: FakeRank, group: FakeGroup) -> None:
    pass


def joins(here: FakeRank, group: FakeGroup) -> None:
    """Connect with rank 0 and do nothing more."""
    group.receive(torch.empty(1, device="cuda"), 0).wait()
    here.cuda.synchronize()


def greets(here: FakeRank, group: FakeGroup) -> None:
    """Connect with rank 1, which calls :func:`joins`."""
    group.send(filled(0, 1), 1)
    here.cuda.synchronize()


@pytest.mark.parametrize(("buffered", "sends"), [(0, 1), (2, 2), (2, 3)])
def test_a_send_ends_only_with_its_receive_or_if_a_buffer_holds_it(buffered: int, sends: int) -> None:
    def first(here: FakeRank, group: FakeGroup) -> None:
        greets(here, group)
        for _ in range(sends):
            work = group.send(filled(7), 1)
        while not work.is_completed():
            here.clock.pause(1e-4)

    with pytest.raises(Deadlock, match=r"rank 0.*send on pair.* runs") if sends > buffered else nullcontext():
        on_two(first, joins, nccl=NcclModes(buffered_sends=buffered))


@pytest.mark.parametrize(("runtime_connect", "waits"), [(True, True), (False, False)])
def test_the_first_use_of_an_algorithm_blocks_the_host_until_the_peer_uses_it(
    *, runtime_connect: bool, waits: bool
) -> None:
    def program(here: FakeRank, group: FakeGroup) -> float:
        small, large = filled(1, 1), filled(1, 8)
        group.all_reduce(small).wait()
        if here.rank == 1:
            here.clock.pause(1)
        before = here.clock.now()
        group.all_reduce(large).wait()
        blocked = here.clock.now() - before
        group.all_reduce(large).wait()
        return blocked

    first, second = on_two(program, program, nccl=NcclModes(runtime_connect=runtime_connect))
    assert (first > 0.9) == waits
    assert second < 0.1


def test_ranks_that_create_different_groups_are_refused() -> None:
    def main(here: FakeRank) -> None:
        here.nccl.new_group([here.rank], DAY, GroupOptions(), "mine")

    with pytest.raises(ModelError, match="new_group is for ranks"):
        Cluster(2).run(main)


def test_creating_a_group_waits_for_no_one() -> None:
    def main(here: FakeRank) -> float:
        if here.rank == 1:
            here.clock.pause(1.0)
        group_of(here)
        return here.clock.now()

    assert Cluster(2).run(main)[0] < 0.5


def test_strided_tensors_are_refused() -> None:
    def first(here: FakeRank, group: FakeGroup) -> None:
        strided = torch.zeros(4, 4, device="cuda").t()
        with pytest.raises(ModelError, match="of a send is not contiguous"):
            group.send(strided, 1)
        with pytest.raises(ValueError, match="must be contiguous"):
            group.all_reduce(strided)

    on_two(first, nothing)


def test_a_smaller_receive_gets_a_part_and_a_larger_one_hangs_without_an_error() -> None:
    assert on_two(sends, partial(receives, size=2))[1] == [7.0] * 2
    with pytest.raises(Deadlock, match=r"rank 1.*receive on pair.* runs"):
        on_two(sends, partial(receives, size=8))


def _abort_a_receive(here: FakeRank, group: FakeGroup) -> FakeWork:
    greets(here, group)
    work = group.receive(torch.zeros(4, device="cuda"), 1)
    assert not work.is_completed()
    group.abort()
    return work


def test_after_an_abort_works_are_complete_without_an_error_and_more_are_refused() -> None:
    """A test of mistakes reads the garbage that such a receive leaves."""

    def first(here: FakeRank, group: FakeGroup) -> None:
        work = _abort_a_receive(here, group)
        assert work.is_completed()
        work.wait()
        here.cuda.synchronize()
        with pytest.raises(RuntimeError, match="was aborted"):
            group.send(filled(7), 1)

    on_two(first, joins)


def test_an_abort_leaves_the_peer_waiting() -> None:
    def first(here: FakeRank, group: FakeGroup) -> None:
        _abort_a_receive(here, group)

    def second(here: FakeRank, group: FakeGroup) -> None:
        joins(here, group)
        group.receive(torch.empty(4, device="cuda"), 0)
        here.cuda.synchronize()

    with pytest.raises(Deadlock, match=r"rank 1.*receive on pair"):
        on_two(first, second)


def test_a_second_thread_must_not_issue() -> None:
    def first(here: FakeRank, group: FakeGroup) -> None:
        tensor = filled(7)
        with ThreadPoolExecutor(1) as pool, pytest.raises(ModelError, match="issue from one thread"):
            pool.submit(group.send, tensor, 1).result()

    on_two(first, nothing)


def test_a_seed_determines_a_run() -> None:
    def first(here: FakeRank, group: FakeGroup) -> float:
        sends(here, group)
        here.cuda.synchronize()
        return here.clock.now()

    times = [on_two(first, receives, seed=seed)[0] for seed in (1, 1, 2)]
    assert times[0] == times[1] != times[2]
