"""The model notices a transport or a plan that would fail on a GPU, and accepts ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import cycle
from typing import Any

import pytest
import torch
from support.fake_nccl.cluster import Cluster, FakeNccl, FakeRank
from support.fake_nccl.communicators import FakeGroup
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
from zbv_worker.transport.channels import ChannelKey, Pending, Receive, Send
from zbv_worker.transport.nccl import NcclTransport
from zbv_worker.transport.torch_api import GroupOptions
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

        changed = [
            replace(c, transfers=swap(c.transfers)) if c.receiver == plan.rank else c for c in plan.channels
        ]
        return replace(plan, channels=tuple(changed))

    with pytest.raises(ModelError, match=r"which is wrong|nothing can happen"):
        run(plan=swapped)


class _OneGroupPerPair:
    """One communicator too few: both directions between two ranks share one."""

    def __init__(self, api: FakeNccl):
        self._api = api
        self._made: dict[tuple[int, ...], FakeGroup | None] = {}
        self.version, self.streams_of_groups = api.version, api.streams_of_groups

    def new_group(
        self, ranks: Sequence[int], timeout: timedelta, options: GroupOptions, name: str
    ) -> FakeGroup | None:
        if tuple(ranks) not in self._made:
            self._made[tuple(ranks)] = self._api.new_group(ranks, timeout, options, name)
        return self._made[tuple(ranks)]


def test_both_directions_on_one_communicator() -> None:
    def made(*args: Any, api: FakeNccl, **options: Any) -> NcclTransport:
        api_of_pairs: Any = _OneGroupPerPair(api)
        return NcclTransport(*args, api=api_of_pairs, **options)

    with pytest.raises(Deadlock, match=r"(receive|send) on .* runs"):
        run(transport=made)


class _Changed(_NeverThroughTheHost):
    """Sends and receives between GPUs that a test changes."""

    def sender(self, key: ChannelKey) -> Send:
        return self.change_send(super().sender(key))

    def receiver(self, key: ChannelKey) -> Receive:
        return self.change_receive(super().receiver(key))

    def change_send(self, send: Send) -> Send:
        return send

    def change_receive(self, receive: Receive) -> Receive:
        return receive


class _SendsFromOneBuffer(_Changed):
    def change_send(self, send: Send) -> Send:
        buffers = dict[TensorSpec, Tensor]()

        def through_buffer(tensor: Tensor, label: object) -> None:
            spec = TensorSpec.of(tensor)
            if spec not in buffers:
                buffers[spec] = torch.empty(spec.shape, dtype=spec.dtype, device="cuda")
            send(buffers[spec].copy_(tensor), label)

        return through_buffer


def test_a_send_tensor_that_is_overwritten_early() -> None:
    with pytest.raises(ModelError, match=r"copy_? overwrites memory that send on .* may not have read yet"):
        run(transport=_SendsFromOneBuffer, device=DeviceModes())


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


class _ReceivesWithoutWait(_Changed):
    def change_receive(self, receive: Receive) -> Receive:
        class Unordered:
            def __init__(self, pending: Any):
                self.wait = pending.wait
                self._buffer = pending.buffer

            def on_stream(self, timeout: float) -> Tensor:
                found: Tensor = self._buffer
                return found

        def post(spec: TensorSpec) -> Pending:
            return Unordered(receive(spec))

        return post


def test_a_tensor_that_is_handed_over_without_a_wait() -> None:
    with pytest.raises(ModelError, match=r"reads memory that receive on .* may not have written yet"):
        run(transport=_ReceivesWithoutWait, device=DeviceModes())


class _OneReceiveTooMany(NcclTransport):
    def close(self) -> None:
        for incoming in self._incoming.values():
            incoming.group.receive(torch.empty(4, device="cuda"), incoming.peer)
        super().close()


def test_a_receive_that_is_still_posted_when_the_transport_closes() -> None:
    with pytest.raises(Deadlock, match=r"shuts channel .* down, which has unfinished operations"):
        run(transport=_OneReceiveTooMany)


class _HeadersStayOnTheHost(_Changed):
    def change_send(self, send: Send) -> Send:
        group: Any = send.__self__.group  # type: ignore[attr-defined]  # a bound method
        peer = send.__self__.peer  # type: ignore[attr-defined]
        return lambda tensor, label: group.send(tensor, peer)


def test_a_header_in_host_memory() -> None:
    with pytest.raises(Exception, match="Tensors must be CUDA and dense"):
        run(transport=_HeadersStayOnTheHost, device=DeviceModes())


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
