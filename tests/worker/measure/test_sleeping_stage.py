"""Stages that only take time."""

from __future__ import annotations

import time

import pytest
import torch
from zbv_worker.measure.rehearse.sleeping_stage import (
    NO_WAIT_NANOSECONDS,
    SPIN_NANOSECONDS,
    SleepingDevice,
    SleepingStage,
    pause_until,
    times_blocked,
)

INPUT = torch.zeros(())
LETTERS = {"F": [3, 30], "I": [2, 20], "W": [1, 10], "B": [4, 40]}
"""Durations by microbatch."""
MS = 1_000_000


@pytest.mark.parametrize("nanoseconds", [0, SPIN_NANOSECONDS // 2, 10 * SPIN_NANOSECONDS])
def test_a_pause_never_ends_early(nanoseconds: int) -> None:
    for _ in range(5):
        due = time.perf_counter_ns() + nanoseconds
        pause_until(due)
        assert time.perf_counter_ns() >= due


def test_most_of_a_long_pause_is_slept() -> None:
    before, cpu = time.perf_counter_ns(), time.thread_time_ns()
    pause_until(before + 100 * SPIN_NANOSECONDS)
    assert time.thread_time_ns() - cpu < (time.perf_counter_ns() - before) / 5


class Host:
    """A simulated host: a clock that the test sets, and pauses that end late."""

    def __init__(self, late: int):
        self.now = self.cpu = self.blocks = 0
        self.late = late
        self.device = SleepingDevice(lambda: self.now, lambda: self.cpu, lambda: self.blocks, self.wait_until)

    def wait_until(self, due: int) -> None:
        self.now = max(self.now, due) + self.late

    def works(self, nanoseconds: int) -> None:
        self.now += nanoseconds
        self.cpu += nanoseconds

    def is_pushed_aside(self, nanoseconds: int) -> None:
        self.now += nanoseconds

    def waits(self, nanoseconds: int) -> None:
        self.now += nanoseconds
        self.blocks += 1


def test_late_wake_ups_and_the_executors_own_time_do_not_accumulate() -> None:
    host = Host(late=MS // 10)
    host.waits(MS)
    for _ in range(50):
        host.works(MS // 10)
        host.is_pushed_aside(MS // 10)
        host.device.take(2 * MS)
    assert host.now == MS + MS // 5 + 50 * 2 * MS + host.late


def test_an_action_that_waited_for_its_input_begins_when_it_arrives() -> None:
    host = Host(late=MS // 10)
    host.device.take(2 * MS)
    host.works(MS // 5)
    host.waits(NO_WAIT_NANOSECONDS + 1)
    began = host.now
    host.device.take(2 * MS)
    assert host.now == began + 2 * MS + host.late


def test_a_host_that_is_slower_than_its_actions_delays_them() -> None:
    host = Host(late=0)
    for _ in range(50):
        host.works(MS)
        host.device.take(MS // 10)
    host.works(MS)
    began = host.now
    host.device.take(100 * MS)
    # The previous action hides a delay of up to its own length.
    assert host.now == began - MS // 10 + 100 * MS


def test_a_sleep_counts_as_a_block_of_the_thread() -> None:
    before = times_blocked()
    time.sleep(0.001)
    assert times_blocked() > before


def test_the_cpu_time_of_the_simulation_is_known() -> None:
    device = SleepingDevice()
    before = time.thread_time_ns()
    device.take(2 * SPIN_NANOSECONDS)
    assert 0 < device.cpu_nanoseconds <= time.thread_time_ns() - before


def test_actions_take_their_own_time_and_return_tensors_of_the_right_size() -> None:
    taken: list[int] = []

    class Watched(SleepingDevice):
        def take(self, nanoseconds: int, arrival: int | None = None) -> int:
            taken.append(nanoseconds)
            return 0

    stage = SleepingStage(LETTERS, output_bytes=1000, gradient_bytes=4001, device=Watched())
    assert stage.forward(0, INPUT, split=True).nbytes == 1000
    for gradient in (stage.backward_input(0, INPUT), stage.backward(0, INPUT)):
        assert gradient is not None
        assert gradient.nbytes == 4004
    stage.backward_weight(0)
    assert taken == [3, 2, 4, 1]
    stage.forward(1, INPUT, split=True)
    stage.backward_weight(1)
    assert taken[4:] == [30, 10]


def test_the_ends_of_the_model_return_a_loss_and_no_gradient() -> None:
    last = SleepingStage(LETTERS, output_bytes=None, gradient_bytes=8, device=SleepingDevice())
    first = SleepingStage(LETTERS, output_bytes=8, gradient_bytes=None, device=SleepingDevice())
    assert last.forward(0, INPUT, split=True).dim() == 0
    assert first.backward_input(0, None) is None
    assert first.backward(0, None) is None
