"""The model of NCCL refuses what ProcessGroupNCCL refuses, and waits where it waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
from support.fake_nccl.cluster import Cluster, FakeRank
from support.fake_nccl.communicators import FakeGroup, FakeWork, NcclModes
from support.fake_nccl.simulation import Deadlock, ModelError
from zbv_worker.transport.torch_api import GroupOptions

DAY = timedelta(days=1)
Program = Callable[[FakeRank, FakeGroup], Any]


def group_of(here: FakeRank, name: str = "pair", timeout: timedelta = DAY) -> FakeGroup:
    made = here.nccl.new_group([0, 1], timeout, GroupOptions(), name)
    assert made is not None
    return made


def on_two(first: Program, second: Program, **modes: Any) -> list[Any]:
    """Run a program on each of two ranks, which have one group."""
    return Cluster(2, **modes).run(lambda here: (first if here.rank == 0 else second)(here, group_of(here)))


def filled(value: float, size: int = 4) -> torch.Tensor:
    return torch.full((size,), float(value), device="cuda")


def sends(here: FakeRank, group: FakeGroup) -> None:
    group.send(filled(7), 1)


def receives(here: FakeRank, group: FakeGroup) -> list[float]:
    buffer = torch.empty(4, device="cuda")
    group.receive(buffer, 0).wait()
    found: list[float] = buffer.tolist()
    return found


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


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda work: work.source_rank(), RuntimeError, "sourceRank"),
        (lambda work: work.result(), ModelError, "never call it"),
        (lambda work: work.exception(), ModelError, "never call it"),
        (lambda work: work.wait(DAY), ModelError, "counts from issue"),
    ],
    ids=["source_rank", "result", "exception", "wait"],
)
def test_calls_that_nccl_does_not_support_or_that_block_are_refused(
    call: Callable[[FakeWork], object], error: type[Exception], message: str
) -> None:
    def first(here: FakeRank, group: FakeGroup) -> None:
        with pytest.raises(error, match=message):
            call(group.send(filled(7), 1))

    on_two(first, receives)


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


@pytest.mark.parametrize(
    "tensor",
    [lambda: torch.zeros(4, pin_memory=True), lambda: torch.zeros(4).to_sparse()],
    ids=["pinned", "sparse"],
)
def test_tensors_that_nccl_cannot_send_are_refused(tensor: Callable[[], torch.Tensor]) -> None:
    """A test of mistakes sends a tensor of the host."""

    def first(here: FakeRank, group: FakeGroup) -> None:
        with pytest.raises(ValueError, match="CUDA and dense"):
            group.send(tensor(), 1)

    on_two(first, nothing)


def test_strided_tensors_are_refused() -> None:
    def first(here: FakeRank, group: FakeGroup) -> None:
        strided = torch.zeros(4, 4, device="cuda").t()
        with pytest.raises(ModelError, match="of a send is not contiguous"):
            group.send(strided, 1)
        with pytest.raises(ValueError, match="must be contiguous"):
            group.all_reduce(strided)

    on_two(first, nothing)


def test_a_smaller_receive_gets_a_part_and_no_error() -> None:
    def second(here: FakeRank, group: FakeGroup) -> list[float]:
        buffer = torch.empty(2, device="cuda")
        group.receive(buffer, 0).wait()
        found: list[float] = buffer.tolist()
        return found

    assert on_two(sends, second)[1] == [7.0] * 2


def test_a_larger_receive_hangs_without_an_error() -> None:
    def second(here: FakeRank, group: FakeGroup) -> None:
        group.receive(torch.empty(8, device="cuda"), 0).wait()
        here.cuda.synchronize()

    with pytest.raises(Deadlock, match=r"rank 1.*receive on pair.* runs"):
        on_two(sends, second)


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


def test_a_group_is_aborted_from_any_thread() -> None:
    def first(here: FakeRank, group: FakeGroup) -> bool:
        greets(here, group)
        work = group.receive(torch.empty(4, device="cuda"), 1)
        thread = threading.Thread(target=group.abort)
        thread.start()
        thread.join()
        return work.is_completed()

    assert on_two(first, joins)[0] is True


def test_a_second_thread_must_not_issue() -> None:
    def first(here: FakeRank, group: FakeGroup) -> list[BaseException]:
        tensor, found = filled(7), list[BaseException]()

        def issue() -> None:
            try:
                group.send(tensor, 1)
            except ModelError as error:
                found.append(error)

        thread = threading.Thread(target=issue)
        thread.start()
        thread.join()
        return found

    (error,) = on_two(first, nothing)[0]
    assert "issue from one thread" in str(error)


def test_a_seed_determines_a_run() -> None:
    def first(here: FakeRank, group: FakeGroup) -> float:
        sends(here, group)
        here.cuda.synchronize()
        return here.clock.now()

    times = [on_two(first, receives, seed=seed)[0] for seed in (1, 1, 2)]
    assert times[0] == times[1] != times[2]
