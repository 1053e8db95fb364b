"""The model notices a transport or a plan that would fail on a GPU, and accepts ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from support.fake_nccl.cluster import Cluster, FakeNccl, FakeRank
from support.fake_nccl.device import DeviceModes
from support.fake_nccl.pipeline import TIMEOUT, ModelRun, run_plan
from support.fake_nccl.simulation import Deadlock, ModelError
from support.plans import unit_problem
from torch import Tensor
from zbv_solver.construct.baselines import baseline
from zbv_solver.construct.greedy_v import get_v_schedule
from zbv_worker.execution.binding import Pinning
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.transport import nccl_operations
from zbv_worker.transport.channels import ChannelKey, Pending, Receive
from zbv_worker.transport.nccl import NcclTransport
from zbv_worker.transport.nccl_operations import StreamSender
from zbv_worker.values.structure import TensorSpec

INTERLEAVED = baseline("interleaved-1f1b", unit_problem(4, 4))


V = unit_problem(4, 4), next(get_v_schedule(unit_problem(4, 4))).orders


def run(**changes: Any) -> None:
    run_plan(*INTERLEAVED, ModelRun(**changes))


class _NeverThroughTheHost(NcclTransport):
    def through_host(self, is_on: bool, timeout: float) -> None:
        pass


def test_the_transport_itself_is_accepted() -> None:
    run()


@pytest.mark.parametrize(
    ("first", "look_ahead"), [("allocations_wait", 0), ("allocations_wait", 1), ("lazy_loading", 3)]
)
def test_a_first_step_with_transfers_between_gpus(first: str, look_ahead: int) -> None:
    device = DeviceModes(**{first: True})  # type: ignore[arg-type]
    with pytest.raises(Deadlock, match="waits until the device is idle"):
        run_plan(*V, ModelRun(transport=_NeverThroughTheHost, device=device, look_ahead=look_ahead, steps=1))


def test_a_step_that_needs_more_memory_than_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_operations.Operations, "hold", lambda self, tensor: None)
    with pytest.raises(Deadlock, match="an allocation waits until the device is idle"):
        run(look_ahead=3)


def test_a_step_that_needs_more_pinned_memory_than_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pinning, "kept", property(lambda self: None, lambda self, kept: None), raising=False)
    with pytest.raises(Deadlock, match="an allocation waits until the device is idle, in Pinning"):
        run()


def test_receives_in_another_order_than_the_sends() -> None:
    def swapped(plan: RankPlan) -> RankPlan:
        def swap(transfers: tuple[Any, ...]) -> tuple[Any, ...]:
            return (transfers[1], transfers[0], *transfers[2:])

        own = plan.channels
        changed = [replace(c, transfers=swap(c.transfers)) if c.receiver == plan.rank else c for c in own]
        return replace(plan, channels=tuple(changed))

    with pytest.raises(ModelError, match=r"which is wrong|nothing can happen"):
        run(plan=swapped)


def test_both_directions_on_one_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    new_group, made = FakeNccl.new_group, dict[tuple[FakeNccl, tuple[int, ...]], Any]()

    def one_per_pair(self: FakeNccl, ranks: Sequence[int], *more: Any) -> Any:
        at = self, tuple(ranks)
        if at not in made:
            made[at] = new_group(self, ranks, *more)
        return made[at]

    monkeypatch.setattr(FakeNccl, "new_group", one_per_pair)
    with pytest.raises(Deadlock, match=r"(receive|send) on .* runs"):
        run()


def between_gpus(message: str) -> None:
    """Run a first step whose tensors move between GPUs, which is noticed for another reason."""
    with pytest.raises((ModelError, ValueError), match=message):
        run(transport=_NeverThroughTheHost, device=DeviceModes())


def test_a_send_tensor_that_is_overwritten_early(monkeypatch: pytest.MonkeyPatch) -> None:
    send, buffers = StreamSender.send, dict[tuple[StreamSender, TensorSpec], Tensor]()

    def through_buffer(self: StreamSender, tensor: Tensor, label: object) -> None:
        at = self, TensorSpec.of(tensor)
        if at not in buffers:
            buffers[at] = torch.empty(at[1].shape, dtype=at[1].dtype, device="cuda")
        send(self, buffers[at].copy_(tensor), label)

    monkeypatch.setattr(StreamSender, "send", through_buffer)
    between_gpus(r"copy_? overwrites memory that send on .* may not have read yet")


class _ReceivesIntoTwoBuffers(_NeverThroughTheHost):
    def receiver(self, key: ChannelKey) -> Receive:
        buffers = dict[tuple[TensorSpec, bool], Tensor]()
        (group, peer), is_second = self._incoming[key], cycle((False, True))

        def post(spec: TensorSpec) -> Pending:
            at = spec, next(is_second)
            if at not in buffers:
                buffers[at] = torch.empty(spec.shape, dtype=spec.dtype, device="cuda")
            buffer = buffers[at].detach()
            return nccl_operations.StreamReceive(group.receive(buffer, peer), buffer, self._operations)

        return post


def test_a_receive_buffer_that_is_reused_early() -> None:
    with pytest.raises(ModelError, match=r"may not have (written|read) yet|which is wrong"):
        run(transport=_ReceivesIntoTwoBuffers, device=DeviceModes())


def test_a_tensor_that_is_handed_over_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_operations.StreamReceive, "on_stream", lambda self, timeout: self.buffer)
    between_gpus(r"reads memory that receive on .* may not have written yet")


def test_a_receive_that_is_still_posted_when_the_transport_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    close = NcclTransport.close

    def receives_once_more(self: NcclTransport) -> None:
        for incoming in self._incoming.values():
            incoming.group.receive(torch.empty(4, device="cuda"), incoming.peer)
        close(self)

    monkeypatch.setattr(NcclTransport, "close", receives_once_more)
    with pytest.raises(Deadlock, match=r"shuts channel .* down, which has unfinished operations"):
        run()


def test_a_header_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamSender, "send", lambda self, tensor, label: self.group.send(tensor, self.peer))
    between_gpus("Tensors must be CUDA and dense")


def test_channels_that_ranks_connect_in_different_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    greet = NcclTransport._greet

    def other_first(self: NcclTransport, key: ChannelKey) -> Any:
        return greet(self, key if self.rank == 0 else ChannelKey(key.receiver, key.sender))

    monkeypatch.setattr(NcclTransport, "_greet", other_first)
    with pytest.raises(Deadlock, match=r"connects channel .* have not entered"):
        run_plan(*baseline("1f1b", unit_problem(2, 2)), ModelRun())


def _abort_while_waiting(here: FakeRank) -> list[float]:
    """Abort in the middle of a wait, as the thread that watches peers' notes does."""
    transport = NcclTransport(
        here.control, here.torch_device, TIMEOUT, api=here.nccl, cuda=here.cuda, clock=here.clock
    )
    key = ChannelKey(0, 1)
    transport.open([key], TIMEOUT)
    if here.rank == 0:
        return []
    pending = transport.receiver(key)(TensorSpec((2,), torch.float32))
    transport.abort(1.0)
    found: list[float] = pending.wait(TIMEOUT).tolist()
    return found


def test_a_receive_that_was_aborted_raises_an_error() -> None:
    with pytest.raises(ConnectionError):
        Cluster(2).run(_abort_while_waiting)


def test_a_completed_receive_that_is_trusted_after_an_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_operations.Operations, "check", lambda self: None)
    with pytest.raises(ModelError, match=r"reads garbage: receive on .* was aborted"):
        Cluster(2).run(_abort_while_waiting)


def test_sums_that_are_used_without_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_operations.StreamSum, "wait", lambda self, timeout: None)
    with pytest.raises(ModelError, match=r"reads .*all_reduce .* may not have written yet"):
        run(replicas=2)


def test_streams_of_fully_shard_that_channels_have() -> None:
    """The pool is so small that they are those of the channels, as after 32 other streams."""
    device = DeviceModes(pool_streams=5)
    with pytest.raises(Deadlock):
        run_plan(*V, ModelRun(replicas=2, is_sharded=True, device=device))
    run_plan(*V, ModelRun(replicas=2, is_sharded=True, device=DeviceModes(pool_streams=8)))
