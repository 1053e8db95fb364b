"""Stages that only take time."""

from __future__ import annotations

import time

import pytest
import torch
from zbv_worker.sleeping_stage import SPIN_NANOSECONDS, SleepingStage, pause

INPUT = torch.zeros(())
LETTERS = {"F": 3_000_000, "I": 2_000_000, "W": 1_000_000, "B": 4_000_000}


@pytest.mark.parametrize("nanoseconds", [0, SPIN_NANOSECONDS // 2, 10 * SPIN_NANOSECONDS])
def test_a_pause_is_never_too_short(nanoseconds: int) -> None:
    for _ in range(5):
        before = time.perf_counter_ns()
        pause(nanoseconds)
        assert time.perf_counter_ns() - before >= nanoseconds


def test_most_of_a_long_pause_is_slept() -> None:
    before, cpu = time.perf_counter_ns(), time.thread_time_ns()
    pause(100 * SPIN_NANOSECONDS)
    assert time.thread_time_ns() - cpu < (time.perf_counter_ns() - before) / 5


def test_actions_take_their_own_time_and_return_tensors_of_the_right_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[int] = []
    monkeypatch.setattr("zbv_worker.sleeping_stage.pause", taken.append)
    stage = SleepingStage(LETTERS, output_bytes=1000, gradient_bytes=4001)
    assert stage.forward(0, INPUT, split=True).nbytes == 1000
    for gradient in (stage.backward_input(0, INPUT), stage.backward(0, INPUT)):
        assert gradient is not None
        assert gradient.nbytes == 4004
    stage.backward_weight(0)
    assert taken == [LETTERS[letter] for letter in "FIBW"]


def test_the_ends_of_the_model_return_a_loss_and_no_gradient() -> None:
    last = SleepingStage(dict.fromkeys("FIWB", 0), output_bytes=None, gradient_bytes=8)
    first = SleepingStage(dict.fromkeys("FIWB", 0), output_bytes=8, gradient_bytes=None)
    assert last.forward(0, INPUT, split=True).dim() == 0
    assert first.backward_input(0, None) is None
    assert first.backward(0, None) is None
