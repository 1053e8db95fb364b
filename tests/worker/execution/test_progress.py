"""A rank's progress, as other threads read it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from support.selfcheck import hard_model
from support.thread_transport import ThreadHub
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.placement import Placement
from zbv_solver.problem.problem import Costs, Memory, Problem
from zbv_worker.errors import ChannelTimeout
from zbv_worker.execution.build_stages import build_stages
from zbv_worker.execution.executor import Executor, ExecutorOptions
from zbv_worker.execution.progress import (
    CurrentProgress,
    Progress,
    ProgressWriter,
    attach_progress,
    progress_of_error,
)
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.host.state_files import read_json
from zbv_worker.transport.channels import key_of

CPU = torch.device("cpu")
ORDERS = Orders.from_text(
    [["0F0", "3F0", "3I0", "0I0", "0W0", "3W0"], ["1F0", "2F0", "2I0", "1I0", "2W0", "1W0"]]
)
WAITING = Progress(step=7, action="3F0", peer=1)
"""Rank 0 without a peer: it runs 0F0, and waits for what 3F0 needs."""


def alone(timeout: float, progress: CurrentProgress | None = None) -> Executor:
    placement = Placement.of("v", 2)
    ones = (1.0,) * 4
    problem = Problem(placement, 1, Costs(ones, ones, ones, ones[1:]), Memory.unlimited(placement))
    plan = RankPlan.of("plan", problem, ORDERS, 0)
    transport = ThreadHub(2).transport(0)
    transport.open([key_of(channel) for channel in plan.channels], timeout)
    model = hard_model()
    return Executor(
        plan,
        build_stages(model, plan, CPU),
        model,
        transport,
        device=CPU,
        timeout=timeout,
        options=ExecutorOptions(progress=progress),
    )


def test_an_error_tells_step_action_and_peer() -> None:
    with pytest.raises(ChannelTimeout) as found:
        alone(timeout=0.2).step(7)
    assert progress_of_error(found.value) == WAITING
    assert progress_of_error(ValueError()) is None


def test_an_error_keeps_the_progress_of_its_cause() -> None:
    def wrapped() -> None:
        try:
            alone(timeout=0.2).step(7)
        except ChannelTimeout as error:
            raise ValueError from error

    with pytest.raises(ValueError) as found:  # noqa: PT011 - it is bare on purpose
        wrapped()
    assert progress_of_error(found.value) == WAITING


def test_the_progress_closest_to_the_error_is_kept() -> None:
    error = ValueError()
    attach_progress(error, Progress(1, "0F0"))
    attach_progress(error, Progress(2, "0F1"))
    assert progress_of_error(error) == Progress(1, "0F0")


def test_errors_that_cause_each_other_in_a_circle_are_followed_once() -> None:
    first, second = ValueError(), ValueError()
    first.__cause__, second.__cause__ = second, first
    assert progress_of_error(first) is None


def test_a_waiting_ranks_progress_shows_its_action(tmp_path: Path) -> None:
    path = tmp_path / "place.json"
    progress = CurrentProgress()
    assert progress.read() == Progress()

    def work() -> None:
        with ProgressWriter(str(path), 0, progress, seconds=0.02), pytest.raises(ChannelTimeout):
            alone(timeout=2.0, progress=progress).step(7)

    thread = threading.Thread(target=work)
    thread.start()
    deadline = time.monotonic() + 30
    while read_json(path) != {"rank": 0, "step": 7, "action": "3F0"} and time.monotonic() < deadline:
        time.sleep(0.02)
    assert thread.is_alive()
    assert read_json(path) == {"rank": 0, "step": 7, "action": "3F0"}
    assert progress.read() == WAITING
    thread.join(30)


def test_a_file_has_a_ranks_last_action_even_after_a_short_run(tmp_path: Path) -> None:
    path = tmp_path / "place.json"
    progress = CurrentProgress()
    with ProgressWriter(str(path), 3, progress, seconds=60):
        assert read_json(path) == {"rank": 3, "step": None, "action": None}
        with pytest.raises(ChannelTimeout):
            alone(timeout=0.1, progress=progress).step(7)
    assert read_json(path) == {"rank": 3, "step": 7, "action": "3F0"}
