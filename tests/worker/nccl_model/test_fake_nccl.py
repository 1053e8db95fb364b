"""The model of NCCL refuses what ProcessGroupNCCL refuses, and waits where it waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from support.fake_nccl.cluster import Cluster, FakeRank
from support.fake_nccl.communicators import FakeGroup, NcclModes
from support.fake_nccl.simulation import Deadlock, ModelError, RankKilled
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


def test_a_tensor_arrives() -> None:
    assert on_two(sends, receives) == [None, [7.0] * 4]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ("is_success", NotImplementedError, "isSuccess.. is deprecated"),
        ("source_rank", RuntimeError, "sourceRank"),
        ("result", ModelError, "never call it"),
        ("exception", ModelError, "never call it"),
    ],
)
def test_methods_that_nccl_does_not_support_raise(call: str, error: type[Exception], message: str) -> None:
    def first(here: FakeRank, group: FakeGroup) -> None:
        with pytest.raises(error, match=message):
            getattr(group.send(filled(7), 1), call)()

    on_two(first, receives)


def test_a_wait_with_a_timeout_is_refused() -> None:
    def first(here: FakeRank, group: FakeGroup) -> None:
        with pytest.raises(ModelError, match="counts from issue"):
            group.send(filled(7), 1).wait(DAY)

    on_two(first, receives)


def test_wait_delays_the_current_stream_and_not_the_host() -> None:
    def first(here: FakeRank, group: FakeGroup) -> None:
        greets(here, group)
        here.clock.pause(1.0)
        group.send(filled(7), 1)

    def second(here: FakeRank, group: FakeGroup) -> tuple[float, float, list[float]]:
        joins(here, group)
        buffer = torch.empty(4, device="cuda")
        work = group.receive(buffer, 0)
        before = here.clock.now()
        work.wait()
        waited = here.clock.now() - before
        total = buffer + buffer
        done = here.cuda.Event(enable_timing=True)
        done.record()
        done.synchronize()
        return waited, here.clock.now() - before, total.tolist()

    waited, until_done, total = on_two(first, second)[1]
    assert waited < 0.001 < 0.9 < until_done
    assert total == [14.0] * 4


def test_an_operation_starts_after_the_work_of_the_issuing_stream() -> None:
    def first(here: FakeRank, group: FakeGroup) -> None:
        tensor = filled(7)
        raw = here.device.memory.raw(tensor)
        here.device.current.launch("slow", 1.0, lambda: raw.fill_(9), (), (tensor,))
        group.send(tensor, 1)

    assert on_two(first, receives)[1] == [9.0] * 4


def test_operations_of_a_group_run_in_the_order_of_issue() -> None:
    def first(here: FakeRank, group: FakeGroup) -> None:
        for value in (1, 2, 3):
            group.send(filled(value, 1), 1)

    def second(here: FakeRank, group: FakeGroup) -> list[float]:
        buffers = [torch.empty(1, device="cuda") for _ in range(3)]
        for buffer in buffers:
            work = group.receive(buffer, 0)
        work.wait()  # the last: all earlier ones have ended too
        return [buffer.item() for buffer in buffers]

    assert on_two(first, second)[1] == [1, 2, 3]


def test_a_send_ends_only_with_its_receive() -> None:
    with pytest.raises(Deadlock, match=r"rank 0.*send on pair.* runs"):
        on_two(_send_alone, joins)


def test_a_buffered_send_ends_without_its_receive() -> None:
    assert on_two(_send_alone, joins, nccl=NcclModes(buffered_sends=2))[0] is None


def test_a_full_buffer_stops_sends() -> None:
    def first(here: FakeRank, group: FakeGroup) -> None:
        _send_alone(here, group, 3)

    with pytest.raises(Deadlock, match="send on pair"):
        on_two(first, joins, nccl=NcclModes(buffered_sends=2))


def _send_alone(here: FakeRank, group: FakeGroup, count: int = 1) -> None:
    greets(here, group)
    for _ in range(count):
        work = group.send(filled(7), 1)
    while not work.is_completed():
        here.clock.pause(1e-4)


def _both_directions(forth: int, back: int) -> Callable[[FakeRank], None]:
    """Both ranks post a receive and then send, over two of some groups."""

    def main(here: FakeRank) -> None:
        groups = [group_of(here, f"group {index}") for index in range(2)]
        mine, other = (groups[forth], groups[back]) if here.rank == 0 else (groups[back], groups[forth])
        here.control.barrier(1.0)
        if here.rank == 0:
            mine.send(filled(0), 1), other.receive(torch.empty(4, device="cuda"), 1)
        else:
            other.receive(torch.empty(4, device="cuda"), 0), mine.send(filled(0), 0)
        here.cuda.synchronize()
        received = torch.empty(4, device="cuda")
        work = other.receive(received, 1 - here.rank)
        mine.send(filled(here.rank), 1 - here.rank)
        work.wait()
        assert received.tolist() == [1.0 - here.rank] * 4

    return main


def test_one_group_has_one_queue_for_both_directions() -> None:
    with pytest.raises(Deadlock, match=r"receive on .* runs"):
        Cluster(2).run(_both_directions(0, 0))


def test_a_group_per_direction_has_two_queues() -> None:
    Cluster(2).run(_both_directions(0, 1))


def test_the_first_use_blocks_the_host_until_the_peer_joins() -> None:
    def first(here: FakeRank, group: FakeGroup) -> float:
        group.send(filled(7), 1)
        return here.clock.now()

    def second(here: FakeRank, group: FakeGroup) -> list[float]:
        here.clock.pause(2.0)
        return receives(here, group)

    assert on_two(first, second)[0] >= 2.0


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


def test_groups_that_are_connected_in_different_orders_hang() -> None:
    def main(here: FakeRank) -> None:
        groups = [group_of(here, name) for name in ("one", "two")]
        for group in groups if here.rank == 0 else reversed(groups):
            group.send(filled(0), 1) if here.rank == 0 else group.receive(filled(0), 0)

    with pytest.raises(Deadlock, match=r"connects one #0 .0:1., which rank.s. \[1\] have not entered"):
        Cluster(2).run(main)


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
    ("tensor", "message"),
    [
        (lambda: torch.zeros(4), "CUDA and dense"),
        (lambda: torch.zeros(4, pin_memory=True), "CUDA and dense"),
        (lambda: torch.zeros(4).to_sparse(), "CUDA and dense"),
    ],
    ids=["host", "pinned", "sparse"],
)
def test_tensors_that_nccl_cannot_send_are_refused(tensor: Callable[[], torch.Tensor], message: str) -> None:
    def first(here: FakeRank, group: FakeGroup) -> None:
        with pytest.raises(ValueError, match=message):
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


def test_a_timeout_counts_from_issue_and_kills_the_rank() -> None:
    def main(here: FakeRank) -> str:
        group = group_of(here, timeout=timedelta(seconds=60))
        if here.rank == 1:
            joins(here, group)
            return "alive"
        greets(here, group)
        work = group.receive(torch.empty(4, device="cuda"), 1)
        here.clock.pause(61.0)  # the host does not wait for the operation at all
        return f"alive, {work}"

    killed, other = Cluster(2, deadlines_pass=True).run(main)
    assert isinstance(killed, RankKilled)
    assert "receive on pair" in str(killed)
    assert other == "alive"


def test_a_killed_rank_runs_no_handler() -> None:
    handled = []

    def main(here: FakeRank) -> None:
        if here.rank == 1:
            return
        try:
            here.clock.pause(10.0)
        except Exception:
            handled.append("error")

    cluster = Cluster(2, deadlines_pass=True)
    cluster.at(1.0, lambda: cluster.kill(0))
    assert isinstance(cluster.run(main)[0], RankKilled)
    assert handled == []


def _abort_a_receive(here: FakeRank, group: FakeGroup) -> tuple[FakeRank, Any, torch.Tensor]:
    greets(here, group)
    buffer = torch.zeros(4, device="cuda")
    work = group.receive(buffer, 1)
    assert not work.is_completed()
    group.abort()
    return here, work, buffer


def test_after_an_abort_works_are_complete_without_an_error() -> None:
    def first(here: FakeRank, group: FakeGroup) -> None:
        _, work, _ = _abort_a_receive(here, group)
        assert work.is_completed()
        work.wait()
        here.cuda.synchronize()

    on_two(first, joins)


def test_after_an_abort_the_data_is_garbage_and_reading_it_is_noticed() -> None:
    def first(here: FakeRank, group: FakeGroup) -> None:
        _, work, buffer = _abort_a_receive(here, group)
        work.wait()
        here.cuda.synchronize()
        buffer.tolist()

    with pytest.raises(ModelError, match=r"reads garbage: receive on pair.* was aborted"):
        on_two(first, joins)


def test_an_aborted_group_refuses_operations() -> None:
    def first(here: FakeRank, group: FakeGroup) -> None:
        _abort_a_receive(here, group)
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


def test_an_abort_that_hangs_raises_at_the_timeout_of_its_group() -> None:
    def first(here: FakeRank, group: FakeGroup) -> float:
        greets(here, group)
        group.set_timeout(timedelta(seconds=5))
        before = here.clock.now()
        with pytest.raises(RuntimeError, match="timed out"):
            group.abort()
        return here.clock.now() - before

    modes = NcclModes(abort_hangs=True)
    assert on_two(first, joins, nccl=modes, deadlines_pass=True)[0] >= 5


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


def test_a_shutdown_hangs_while_operations_are_pending() -> None:
    def first(here: FakeRank, group: FakeGroup) -> None:
        greets(here, group)
        group.receive(torch.empty(4, device="cuda"), 1)
        here.nccl.destroy()

    with pytest.raises(Deadlock, match="rank 0, host: shuts pair #0 down"):
        on_two(first, joins)


def test_a_network_error_is_seen_when_a_work_is_polled_and_raised_by_wait() -> None:
    cluster = Cluster(2, deadlines_pass=True)

    def main(here: FakeRank) -> None:
        group = group_of(here)
        if here.rank == 1:
            joins(here, group)
            return
        greets(here, group)
        work = group.receive(torch.empty(4, device="cuda"), 1)
        (communicator,) = cluster.communicators.by_key.values()
        communicator.error = "ncclRemoteError"
        work.wait()  # not polled yet: no error is known
        assert work.is_completed()
        with pytest.raises(RuntimeError, match="ncclRemoteError"):
            work.wait()

    cluster.run(main)


def test_a_peer_that_dies_on_this_node_is_not_reported() -> None:
    cluster = Cluster(2)

    def main(here: FakeRank) -> None:
        group = group_of(here)
        if here.rank == 1:
            joins(here, group)
            cluster.kill(1)
            here.clock.pause(1.0)
        greets(here, group)
        work = group.receive(torch.empty(4, device="cuda"), 1)
        while not work.is_completed():
            here.clock.pause(1e-3)

    with pytest.raises(Deadlock, match=r"rank 0.*receive on pair.* runs"):
        cluster.run(main)


def test_sums_gathers_and_scattered_sums_over_a_group() -> None:
    def main(here: FakeRank) -> list[list[float]]:
        group = group_of(here)
        mine = torch.tensor([1.0 + here.rank, 10.0], device="cuda")
        whole, part = torch.empty(4, device="cuda"), torch.empty(2, device="cuda")
        group.all_gather(whole, mine).wait()
        group.reduce_scatter(part, whole).wait()
        group.all_reduce(mine).wait()
        return [whole.tolist(), part.tolist(), mine.tolist()]

    assert Cluster(2).run(main) == [
        [[1, 10, 2, 10], [2, 20], [3, 20]],
        [[1, 10, 2, 10], [4, 20], [3, 20]],
    ]


def test_a_deadline_passes_in_virtual_time() -> None:
    def first(here: FakeRank, group: FakeGroup) -> float:
        greets(here, group)
        work = group.receive(torch.empty(4, device="cuda"), 1)
        deadline = here.clock.now() + 3600
        while not work.is_completed() and here.clock.now() < deadline:
            here.clock.pause(5e-5)
        return here.clock.now() - deadline

    late = on_two(first, joins, deadlines_pass=True)[0]
    assert 0 <= late < 60


def test_a_seed_determines_a_run() -> None:
    def first(here: FakeRank, group: FakeGroup) -> float:
        sends(here, group)
        here.cuda.synchronize()
        return here.clock.now()

    times = [on_two(first, receives, seed=seed)[0] for seed in (1, 1, 2)]
    assert times[0] == times[1] != times[2]
