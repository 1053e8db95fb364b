"""The executor's errors for wrong plans and lost peers, and its reports."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.plans import V_OF_TWO as ORDERS
from support.plans import unit_problem
from support.selfcheck import hard_model
from support.thread_transport import ThreadHub, ThreadTransport
from zbv_solver.plans.channels import Channel
from zbv_solver.plans.orders import Action
from zbv_solver.problem.stages import Placement
from zbv_worker.errors import ChannelTimeout, InvalidRun, PeerLost
from zbv_worker.execution.build_stages import build_stages
from zbv_worker.execution.executor import Executor, ExecutorOptions
from zbv_worker.execution.rank_plan import RankPlan, lower
from zbv_worker.failures.progress import CurrentProgress, Progress, progress_of_error
from zbv_worker.transport.channels import ChannelKey, Send, Transport, key_of

CPU = torch.device("cpu")


def executor_of(rank: int, transport: Transport, timeout: float, **options: Any) -> Executor:
    plan = RankPlan.of("plan", unit_problem(2, 2), ORDERS, rank)
    transport.open([key_of(channel) for channel in plan.channels], timeout)
    stages, model = build_stages(hard_model(), plan, CPU), hard_model()
    how = ExecutorOptions(**options)
    return Executor(plan, stages, model, transport, device=CPU, timeout=timeout, options=how)


def test_a_rank_with_a_hanging_peer_names_the_action_the_tensor_and_the_peer() -> None:
    progress = CurrentProgress()
    executor = executor_of(0, ThreadHub(2).transport(0), timeout=0.2, progress=progress)
    said = r"rank 0 waited 0\.2 s at 3F0 for the activation of 2F0 from rank 1"
    with pytest.raises(ChannelTimeout, match=said) as found:
        executor.step(7)
    assert progress_of_error(found.value) == progress.read() == Progress(step=7, action="3F0", peer=1)


def test_a_rank_with_a_lost_peer_fails_at_once() -> None:
    hub = ThreadHub(2)
    executor = executor_of(0, hub.transport(0), timeout=30)
    hub.transport(1).close()
    with pytest.raises(PeerLost, match=r"rank 0 waited at 3F0 .* Check why rank 1 ended"):
        executor.step(0)


def test_a_failed_send_is_not_blamed_on_the_rank_that_sends_the_next_input() -> None:
    def fail_at_3f0() -> None:
        if progress.read().action == "3F0":
            raise ConnectionError("sending 0F1 to rank 5: connection reset")

    progress = CurrentProgress()
    executor = executor_of(0, ThreadHub(2).transport(0), timeout=30, progress=progress)
    executor._check = fail_at_3f0
    with pytest.raises(PeerLost, match="an earlier send failed") as found:
        executor.step(7)
    assert progress.read().peer == 1
    assert progress_of_error(found.value) == Progress(step=7, action="3F0", peer=None)


class Mute(ThreadTransport):
    """A rank that sends no gradients."""

    def sender(self, key: ChannelKey) -> Send:
        send = super().sender(key)
        return lambda tensor, label: None if "I" in str(label) else send(tensor, label)


def test_a_missing_gradient_is_named_by_its_producer() -> None:
    def wait_no_longer_for_gradients() -> None:
        if progress.read().action == "0I0":
            for inbox in executor._binding.inboxes.values():
                inbox._timeout = 0.1

    hub, progress = ThreadHub(2), CurrentProgress()
    executor = executor_of(0, hub.transport(0), timeout=60, progress=progress)
    executor._check = wait_no_longer_for_gradients
    peer = executor_of(1, Mute(hub, 1), timeout=60)
    thread = threading.Thread(target=peer.step, args=(0,))
    thread.start()
    with pytest.raises(ChannelTimeout, match="at 0I0 for the gradient of stage 1, microbatch 0 from rank 1"):
        executor.step(0)
    thread.join(60)
    assert not thread.is_alive()


def test_a_step_reports_every_action_in_order_and_losses_where_the_last_stage_is() -> None:
    hub = ThreadHub(2)
    executors = [executor_of(rank, hub.transport(rank), timeout=60) for rank in (0, 1)]
    results = hub.run(lambda transport: [executors[transport.rank].step(step) for step in range(3)])
    for rank, reported in enumerate(results):
        assert [result.step for result in reported] == [0, 1, 2]
        for result in reported:
            assert [str(record.action) for record in result.records] == ORDERS.text(rank)
            assert all(record.wait <= record.start <= record.end for record in result.records)
            assert result.seconds > 0
    assert [result.loss is not None for result in results[0]] == [True] * 3
    assert [result.loss for result in results[1]] == [None] * 3
    assert set(results[0][0].losses) == {0, 1}


def test_an_error_in_a_stage_carries_rank_step_and_action() -> None:
    executor = executor_of(0, ThreadHub(2).transport(0), timeout=1)
    stage: Any = executor._stages[0]
    stage.module.register_forward_hook(Mock(side_effect=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError) as caught:
        executor.step(7)
    assert caught.value.__notes__ == ["rank 0, step 7, action 0F0"]


def test_a_stage_is_reported_right_after_the_last_action_that_adds_to_its_gradients() -> None:
    """In the order of the list, not of the stage numbers."""
    hub, progress, done = ThreadHub(2), CurrentProgress(), list[tuple[int, str]]()

    def note(stage: int) -> None:
        done.append((stage, str(progress.read().action)))

    first = executor_of(0, hub.transport(0), 20, progress=progress, on_stage_done=note)
    executors = [first, executor_of(1, hub.transport(1), 20)]
    hub.run(lambda transport: [executors[transport.rank].step(step) for step in range(2)])
    assert done == [(0, "0W1"), (3, "3W1")] * 2


def test_only_the_last_w_or_b_of_a_stage_completes_it() -> None:
    text = "0F0 0F1 0F2 1F0 1F1 1F2 1B2 1I0 0I2 1I1 1W1 1W0 0B0 0W2 0B1"
    program = lower(RankPlan("plan", 0, Placement.of("v", 1), 3, tuple(map(Action.parse, text.split())), ()))
    assert [str(i.action) for i in program if i.completes_stage] == ["1W0", "0B1"]


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (["0F0", "0I0", "0W0"], "does not finish stage·microbatch 1·0"),
        (["0F0", "1F0", "1B0", "0I0"], "does not finish stage·microbatch 0·0"),
        (["0F0", "1F0", "1W0"], "action 1W0 follows F"),
        (["0F0", "0F0"], "action 0F0 follows F"),
        (["0F0", "1F0", "1B0", "1W0"], "action 1W0 follows B"),
        (["2F0"], "action 2F0 is on another rank"),
        (["0F1"], "action 0F1 is on another rank"),
    ],
)
def test_incomplete_lists_are_refused(actions: list[str], message: str) -> None:
    with pytest.raises(InvalidRun, match=message):
        RankPlan("plan", 0, Placement.of("v", 1), 1, tuple(map(Action.parse, actions)), ())


def test_channels_that_contradict_the_list_are_refused() -> None:
    plan = RankPlan.of("plan", unit_problem(2, 2), ORDERS, 0)
    assert len(lower(plan)) == 12
    sending = next(channel for channel in plan.channels if channel.sender == 0)
    for at, (first, second) in enumerate(pairwise(sending.transfers)):
        turned = (*sending.transfers[:at], second, first, *sending.transfers[at + 2 :])
        mutated = replace(sending, transfers=turned)
        channels = tuple(mutated if channel is sending else channel for channel in plan.channels)
        with pytest.raises(InvalidRun, match=r"channels \(0→1\)"):
            lower(replace(plan, channels=channels))
    with pytest.raises(InvalidRun, match="do not carry"):
        lower(replace(plan, channels=plan.channels[1:]))
    unused = Channel(2, 0, ())
    with pytest.raises(InvalidRun, match=r"channels \(2→0\)"):
        lower(replace(plan, channels=(*plan.channels, unused)))
