"""The model of CUDA: streams, events, memory, and what may not run at the same time."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from support.fake_nccl.cluster import Cluster, FakeRank
from support.fake_nccl.device import DeviceModes, FakeStream
from support.fake_nccl.simulation import ModelError
from zbv_worker.transport.torch_api import GroupOptions

DAY = timedelta(days=1)


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


def test_the_33rd_stream_of_a_priority_is_the_first() -> None:
    def main(here: FakeRank) -> tuple[list[FakeStream], FakeStream]:
        return [here.cuda.Stream() for _ in range(33)], here.cuda.Stream(priority=-1)

    normal, high = alone(main)
    assert len(set(normal)) == 32
    assert normal[32] is normal[0]
    assert high not in normal


def _on_two_streams(here: FakeRank, first: Any, second: Any, *, ordered: bool) -> None:
    """Queue two uses of one tensor on two streams."""
    tensor = torch.zeros(2, device="cuda")
    other = here.cuda.Stream()
    other.wait_stream(here.cuda.current_stream())
    uses: dict[str, Any] = {first: (tensor,)}
    slow(here, name="first", **uses)
    if ordered:
        other.wait_stream(here.cuda.current_stream())
    with here.cuda.stream(other):
        uses = {second: (tensor,)}
        slow(here, name="second", **uses)
    here.cuda.current_stream().wait_stream(other)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("writes", "reads", "second reads memory that first may not have written yet"),
        ("reads", "writes", "second overwrites memory that first may not have read yet"),
        ("writes", "writes", "second overwrites memory that first may not have written yet"),
    ],
)
def test_uses_of_memory_without_an_order_are_noticed(first: str, second: str, message: str) -> None:
    alone(lambda here: _on_two_streams(here, first, second, ordered=True))
    with pytest.raises(ModelError, match=message):
        alone(lambda here: _on_two_streams(here, first, second, ordered=False))


def test_two_readers_need_no_order() -> None:
    alone(lambda here: _on_two_streams(here, "reads", "reads", ordered=False))


def test_what_the_host_saw_finished_is_ordered_before_what_it_queues_next() -> None:
    def main(here: FakeRank) -> list[float]:
        tensor, other = torch.zeros(2, device="cuda"), here.cuda.Stream()
        slow(here, writes=(tensor,))
        done = here.cuda.Event()
        done.record()
        while not done.query():
            here.clock.pause(1e-3)
        with here.cuda.stream(other):
            return tensor.tolist()

    assert alone(main) == [9.0, 9.0]


def test_memory_that_nothing_wrote_must_not_be_read() -> None:
    with pytest.raises(ModelError, match="reads garbage: nothing has written it"):
        alone(lambda here: torch.empty(2, device="cuda").tolist())


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


def test_freed_memory_is_available_at_once_on_its_own_stream() -> None:
    def main(here: FakeRank) -> list[int]:
        before = here.device.memory.device.live
        tensor = torch.zeros(2, device="cuda")
        slow(here, reads=(tensor,))
        held = here.device.memory.device.live
        del tensor
        return [before, held, here.device.memory.device.live]

    assert alone(main) == [0, 8, 0]


def test_the_memory_of_a_send_is_available_only_after_the_send() -> None:
    def main(here: FakeRank) -> list[int]:
        group = here.nccl.new_group([0, 1], DAY, GroupOptions(), "pair")
        assert group is not None
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


def test_a_device_reaches_no_host_memory() -> None:
    with pytest.raises(ModelError, match="uses host memory"):
        alone(lambda here: slow(here, reads=(torch.zeros(2),)))


def test_a_function_that_the_model_does_not_know_is_refused() -> None:
    with pytest.raises(ModelError, match="does not know erfinv"):
        alone(lambda here: torch.zeros(2, device="cuda").erfinv())


def test_tensors_are_on_their_device() -> None:
    def main(here: FakeRank) -> tuple[Any, ...]:
        tensor = torch.zeros(2, device=here.torch_device)
        moved = torch.ones(2).pin_memory().to(here.torch_device, non_blocking=True)
        return str(tensor.device), tensor.is_cuda, str(moved.device), str(moved.cpu().device), moved.tolist()

    assert alone(main) == ("cuda:0", True, "cuda:0", "cpu", [1.0, 1.0])


def test_full_multiprocessors_delay_a_kernel_of_nccl_until_compute_ends() -> None:
    def main(here: FakeRank) -> float:
        group = here.nccl.new_group([0, 1], DAY, GroupOptions(), "pair")
        assert group is not None
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


def test_lazy_loading_waits_for_the_device_at_the_first_launch_of_a_kernel() -> None:
    def main(here: FakeRank) -> list[float]:
        slow(here, name="first")
        slow(here, name="second")
        second = here.clock.now()
        slow(here, name="second")
        return [second, here.clock.now()]

    second, again = alone(main, lazy_loading=True)
    assert 0.9 < second < again < 1.1
