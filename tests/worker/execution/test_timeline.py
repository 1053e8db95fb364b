"""Times on a GPU, and how far the host may run ahead of it, tested on a simulated GPU."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.fake_cuda import FakeCuda, FakeEvent, HostOfDevice
from support.plans import V_OF_TWO as ORDERS
from support.plans import unit_problem
from support.thread_transport import ThreadHub, ThreadTransport
from torch import Tensor
from zbv_solver.plans.orders import Action
from zbv_worker.errors import ChannelTimeout, PeerLost, WorkerError
from zbv_worker.execution.executor import Executor, ExecutorOptions
from zbv_worker.execution.rank_plan import Instruction, RankPlan
from zbv_worker.execution.timeline import (
    CudaTimeline,
    HostTimeline,
    Overdue,
    Patience,
    Queued,
    QueuedWork,
    Record,
)
from zbv_worker.failures.progress import CurrentProgress, Progress, progress_of_error
from zbv_worker.measure.rehearse.sleeping_stage import NoBatches
from zbv_worker.transport.channels import key_of

CPU = torch.device("cpu")
MILLISECONDS = {"F": 3.0, "I": 4.0, "W": 2.0}


class Kernels:
    """A stage whose actions queue work on the GPU and return at once."""

    def __init__(self, cuda: FakeCuda, unfinished: list[int]):
        self._cuda = cuda
        self._unfinished = unfinished

    def _queue(self, letter: str) -> Tensor:
        # Three marks an action: the events of ends that were not passed yet.
        ends = self._cuda.events[2:36:3]
        self._unfinished.append(sum(not end.is_passed for end in ends))
        self._cuda.compute.compute(MILLISECONDS[letter])
        return torch.zeros(1)

    def forward(self, microbatch: int, input: Tensor, target: Tensor | None = None, *, split: bool) -> Tensor:
        return self._queue("F")

    def backward(self, microbatch: int, grad_output: Tensor | None) -> Tensor | None:
        return self._queue("I")

    def backward_input(self, microbatch: int, grad_output: Tensor | None) -> Tensor | None:
        return self._queue("I")

    def backward_weight(self, microbatch: int) -> None:
        self._queue("W")


class Hanging(Kernels):
    """A stage whose first kernel never ends."""

    def _queue(self, letter: str) -> Tensor:
        self._cuda.compute.hang()
        return super()._queue(letter)


class OnStream:
    """Like an NCCL receive: the host goes on, the compute stream waits."""

    def __init__(self, cuda: FakeCuda, milliseconds: float | None):
        self._cuda = cuda
        self._milliseconds = milliseconds

    def wait(self, timeout: float) -> Tensor:
        return torch.tensor([0, 1, 1, 0, 0, 0, 0, 0, 0, 0])  # a header: float32, [1]

    def on_stream(self, timeout: float) -> Tensor:
        if self._milliseconds is None:
            self._cuda.compute.hang()
        else:
            self._cuda.compute.compute(self._milliseconds)
        return torch.zeros(1)


def executor_of(
    cuda: FakeCuda,
    arrival: float | None = 1.0,
    timeout: float = 60.0,
    run_ahead: int = 3,
    *,
    unfinished: list[int] | None = None,
    last_stage: type[Kernels] = Kernels,
    replicas: int = 1,
    **options: Any,
) -> Executor:
    """One rank; tensors of its peer arrive after some time, or never."""
    plan = RankPlan.of("plan", unit_problem(2, 2), ORDERS, 0)
    transport: Any = ThreadTransport(ThreadHub(2, replicas), 0)
    transport.receiver = lambda key: lambda spec: OnStream(cuda, arrival)
    transport.open([key_of(channel) for channel in plan.channels], 1.0)
    counts = unfinished if unfinished is not None else []
    stages = {0: Kernels(cuda, counts), 3: last_stage(cuda, counts)}
    timeline = CudaTimeline(CPU, HostOfDevice(cuda), run_ahead, cuda, pin=False)
    how = ExecutorOptions(progress=CurrentProgress(), timeline=timeline, **options)
    return Executor(plan, stages, NoBatches(), transport, device=CPU, timeout=timeout, options=how)


def test_records_are_gpu_times_on_the_hosts_clock() -> None:
    cuda = FakeCuda()
    executor = executor_of(cuda, arrival=5.0)
    for step in range(4):  # later steps reuse the events of earlier ones
        before = cuda.milliseconds
        records = executor.step(step).records
        assert [str(record.action) for record in records] == ORDERS.text(0)
        for record in records:
            remote = str(record.action) in ("3F0", "3F1", "0I0", "0I1")
            assert record.start - record.wait == (5_000_000 if remote else 0)
            assert record.end - record.start == MILLISECONDS[record.action.letter] * 1_000_000
            assert record.received == (4 if remote else 0)
        assert all(before.end == after.wait for before, after in pairwise(records))
        # The host polls at most one piece of work, of up to 5 ms, before the device has passed an event.
        offset = records[0].wait / 1e6 - 1e6 - before
        assert -5.0 <= offset <= 0.0
    assert len(cuda.events) == 2 * (3 * 12 + 1)


def test_a_steps_records_are_right_although_the_next_step_is_launched_before_they_are_read() -> None:
    cuda = FakeCuda()
    executor = executor_of(cuda, arrival=5.0)
    earlier = executor.launch(0)
    for step in range(1, 4):
        later = executor.launch(step)
        records, following = earlier.result().records, later
        assert [str(record.action) for record in records] == ORDERS.text(0)
        assert records[-1].end - records[0].wait == 56_000_000
        earlier = following
    assert earlier.result().records[0].wait >= records[-1].end


def test_the_host_does_not_wait_for_the_end_of_a_step() -> None:
    cuda = FakeCuda()
    executor = executor_of(cuda, arrival=5.0, run_ahead=4)
    launched = executor.launch(0)
    launched.end([torch.tensor(2.5)])
    unfinished = sum(not event.is_passed for event in cuda.events[2::3])
    assert unfinished == 4  # the run-ahead limit allows as many
    executor.launch(1)
    assert cuda.events[35].is_passed
    assert launched.result().numbers == (2.5,)


@pytest.mark.parametrize("run_ahead", [1, 2, 5])
def test_the_host_runs_ahead_up_to_its_limit(run_ahead: int) -> None:
    unfinished: list[int] = []
    executor_of(FakeCuda(), arrival=5.0, run_ahead=run_ahead, unfinished=unfinished).step(0)
    assert len(unfinished) == 12
    assert max(unfinished) == run_ahead - 1  # without the action that is being queued


@pytest.mark.parametrize("run_ahead", [3, 100])
def test_a_missing_tensor_is_named_by_its_action_not_by_the_hosts_position(run_ahead: int) -> None:
    """The host waits for the GPU at most for the timeout, within a step and at its end."""
    executor = executor_of(FakeCuda(), arrival=None, timeout=0.1, run_ahead=run_ahead)
    said = r"rank 0 waited 0\.1 s at 3F0 for the activation of 2F0 from rank 1"
    with pytest.raises(ChannelTimeout, match=said) as e:
        executor.step(4)
    assert progress_of_error(e.value) == Progress(4, "3F0", 1)
    assert e.value.__notes__[0] == "rank 0, step 4, action 3F0"


def test_a_hanging_kernel_is_not_blamed_on_a_peer() -> None:
    executor = executor_of(FakeCuda(), timeout=0.1, last_stage=Hanging)
    with pytest.raises(WorkerError, match=r"rank 0: its GPU did not complete 3F0 within 0\.1 s") as e:
        executor.step(0)
    assert not isinstance(e.value, ChannelTimeout | PeerLost)
    assert progress_of_error(e.value) == Progress(0, "3F0", 1)


def test_an_action_that_has_its_input_may_wait_for_the_parameters_of_another_replica() -> None:
    executor = executor_of(FakeCuda(), timeout=0.1, last_stage=Hanging, replicas=2)
    said = r"not complete 3F0 .*for the parameters of rank 1, which holds"
    with pytest.raises(ChannelTimeout, match=said) as e:
        executor.step(0)
    assert progress_of_error(e.value) == Progress(0, "3F0", None), "any rank may be the cause"


def test_the_update_is_waited_for_like_an_action_and_is_named() -> None:
    cuda = FakeCuda()
    executor = executor_of(cuda, timeout=0.1)
    launched = executor.launch(3)
    cuda.compute.hang()
    launched.end()
    with pytest.raises(ChannelTimeout, match=r"did not complete the update after step 3 within 0\.1 s") as e:
        executor.launch(4)
    assert e.value.__notes__[0] == "rank 0, step 3, action None"
    assert progress_of_error(e.value) == Progress(3, None, None), "any rank may be the cause"


@pytest.mark.parametrize("starting", [1, 2])
def test_only_the_first_steps_have_the_longer_timeout(starting: int) -> None:
    clocks = []
    for first in (True, False):
        cuda = FakeCuda()
        executor = executor_of(cuda, timeout=0.1, startup_timeout=50.0, startup_steps=starting)
        for step in range(starting - first):
            executor.step(step)
        cuda.compute.hang()
        before = HostOfDevice(cuda).now()
        with pytest.raises(WorkerError) as e:
            executor.step(2)
        clock = executor._timeline.clock
        clocks.append(clock.now() - before)
        assert ("within 50 s" if first else "within 0.1 s") in str(e.value)
        assert ("--startup-timeout" if first else "--timeout") in str(e.value)
    assert clocks[0] > 50 > 1 > clocks[1]


def instruction(text: str, peer: int | None = None) -> Instruction:
    return Instruction(Action.parse(text), None, None, split=True, completes_stage=False, peer=peer)


def events(cuda: FakeCuda) -> tuple[FakeEvent, FakeEvent]:
    """Those of the start and of the end of an action."""
    return cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)


class Ticking:
    """A clock that advances by a second at every pause; every few seconds the GPU completes an action."""

    def __init__(self, every: int):
        self._every = every
        self.seconds = 0
        self.gates: list[Callable[[], None]] = []

    def now(self) -> float:
        return float(self.seconds)

    def pause(self, _: float) -> None:
        self.seconds += 1
        if self.seconds % self._every == 0 and self.gates:
            self.gates.pop(0)()


def queued_actions(every: int, timeout: float, checks: list[int]) -> tuple[Queued, Ticking]:
    """Three actions on a GPU that needs ``every`` seconds for each."""
    cuda = FakeCuda()
    ticking = Ticking(every)
    queued = Queued(2, lambda: checks.append(1), ticking)
    for text in ("0F0", "0F1", "0F2"):
        start, end = events(cuda)
        start.record(cuda.compute)
        ticking.gates.append(cuda.compute.hang())
        end.record(cuda.compute)
        queued.add(QueuedWork(0, 0, instruction(text), start, end, Patience(timeout)))
    return queued, ticking


def test_while_the_device_waits_for_a_rank_the_progress_names_it() -> None:
    cuda, progress = FakeCuda(), CurrentProgress()
    seen: list[int | None] = []
    clock = HostOfDevice(cuda)
    queued = Queued(9, lambda: seen.append(progress.waiting_for), clock, progress)
    start, end = events(cuda)
    arrive = cuda.compute.hang()
    start.record(cuda.compute)
    compute = cuda.compute.hang()
    end.record(cuda.compute)
    queued.add(QueuedWork(0, 0, instruction("3F0", peer=7), start, end, Patience(0.05)))
    with pytest.raises(Overdue):
        queued.finish(0)
    assert set(seen) == {7}
    arrive()
    cuda.settle()
    with pytest.raises(Overdue):
        queued.finish(0)
    assert seen[-1] is None  # it has the tensor, and computes
    compute()
    queued.finish(0)
    assert progress.waiting_for is None


def test_every_action_has_its_own_timeout() -> None:
    checks: list[int] = []
    queued, ticking = queued_actions(every=6, timeout=9.0, checks=checks)
    queued.make_room()
    assert len(queued) == 1
    bounds = queued.finish(0)
    assert len(queued) == 0
    assert ticking.seconds >= 18 > 9
    assert len(checks) == ticking.seconds  # other failures are checked at every pause
    assert bounds == [6.0, 12.0, 18.0]  # the last vain polls


def test_an_action_that_takes_longer_is_overdue() -> None:
    queued, ticking = queued_actions(every=20, timeout=9.0, checks=[])
    with pytest.raises(Overdue) as found:
        queued.finish(0)
    assert found.value.work.instruction == instruction("0F0")
    assert found.value.started
    assert ticking.seconds == 10


def test_a_failure_elsewhere_ends_the_wait() -> None:
    queued, _ = queued_actions(every=20, timeout=9.0, checks=[])
    queued._check = Mock(side_effect=ConnectionError("an earlier send"))
    with pytest.raises(ConnectionError, match="an earlier send"):
        queued.finish(0)


def test_times_on_the_cpu_are_the_clocks() -> None:
    timeline = HostTimeline(iter(range(10, 100)).__next__)
    assert timeline.run_ahead is None
    records = [Record(Action.parse("0F0"), timeline.mark(), timeline.mark(), timeline.mark())]
    assert timeline.resolved(records, []) == (Record(Action.parse("0F0"), 10, 11, 12),)
