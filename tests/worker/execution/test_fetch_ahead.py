"""Microbatches are fetched on a thread, in the order of need, a fixed number ahead."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait

import numpy as np
import pytest
import torch
from support.plans import unit_problem
from support.selfcheck import hard_model
from support.thread_transport import ThreadHub
from torch import Tensor
from zbv_solver.plans.orders import Orders
from zbv_worker.errors import WorkerError
from zbv_worker.execution.build_stages import build_stages
from zbv_worker.execution.executor import Executor, ExecutorOptions
from zbv_worker.execution.fetch_ahead import FetchAhead, order_of_need
from zbv_worker.execution.rank_plan import RankPlan, lower

CPU = torch.device("cpu")
ORDERS = Orders.from_text([["0F1", "0F0", "1F0", "1B0", "1F1", "0B0", "1B1", "0B1"]])


class Source:
    """Data that says which microbatch it is, and remembers who fetched it."""

    def __init__(self) -> None:
        self.fetched: list[tuple[int, int]] = []
        self.threads: list[str] = []
        self.before: Callable[[int, int], object] = lambda step, index: None

    def microbatch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        self.fetched.append((step, index))
        self.threads.append(threading.current_thread().name)
        self.before(step, index)
        return torch.tensor([float(step), index]), torch.tensor(-1.0)


def fetching(source: Source, ahead: int = 2, last_step: int | None = 10, timeout: float = 60.0) -> FetchAhead:
    return FetchAhead(source.microbatch, (1, 0, 2), ahead, torch.clone, timeout, last_step)


def take(data: FetchAhead, step: int) -> list[list[float]]:
    fetch = data.begin(step)
    return [fetch(step, index)[0].tolist() for index in (1, 0, 2)]


def settled(source: Source, data: FetchAhead) -> list[tuple[int, int]]:
    """What has been fetched once the thread has nothing more to fetch."""
    assert not wait([future for _, future in data._fetched], 60).not_done
    return source.fetched


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert [each.name for each in threading.enumerate() if each.name.startswith("zbv-data")] == []


def test_a_thread_fetches_in_the_lists_order_and_no_further_ahead_than_allowed() -> None:
    source = Source()
    data = fetching(source, ahead=2)
    fetch = data.begin(0)
    fetch(0, 1)
    assert source.fetched == [(0, 1)]  # the first on the launching thread, which looks at the generators
    fetch(0, 0)
    assert settled(source, data) == [(0, 1), (0, 0), (0, 2), (1, 1)]
    fetch(0, 2)
    assert take(data, 1) == [[1, 1], [1, 0], [1, 2]]
    assert settled(source, data) == [(s, i) for s in range(2) for i in (1, 0, 2)] + [(2, 1), (2, 0)]
    assert source.threads[0] == threading.current_thread().name
    assert set(source.threads[1:]) == {"zbv-data_0"}
    data.close()


def test_nothing_after_the_last_step_is_fetched() -> None:
    source = Source()
    data = fetching(source, ahead=50, last_step=1)
    for step in range(2):
        take(data, step)
    assert settled(source, data) == [(s, i) for s in range(2) for i in (1, 0, 2)]
    data.close()


def test_data_with_a_state_is_fetched_only_within_its_step() -> None:
    source = Source()
    data = fetching(source, ahead=50, last_step=None)
    for step in range(3):
        assert take(data, step) == [[step, 1], [step, 0], [step, 2]]
        assert settled(source, data)[-1] == (step, 2)
    data.close()


def test_after_an_interruption_fetching_starts_at_the_step_that_is_asked_for() -> None:
    source = Source()
    data = fetching(source)
    take(data, 0)
    data.close()  # for an evaluation
    assert take(data, 1) == [[1, 1], [1, 0], [1, 2]]
    assert take(data, 5) == [[5, 1], [5, 0], [5, 2]]  # not the step that was fetched ahead
    data.close()


def test_without_a_number_ahead_every_call_is_on_the_launching_thread() -> None:
    source = Source()
    take(fetching(source, ahead=0), 0)
    assert set(source.threads) == {threading.current_thread().name}


@pytest.mark.parametrize("draw", [lambda: torch.rand(1), random.random, lambda: np.random.random()])
def test_data_that_draws_from_a_global_generator_is_not_fetched_on_a_thread(
    draw: Callable[[], object], capsys: pytest.CaptureFixture[str]
) -> None:
    source = Source()
    source.before = lambda step, index: draw()
    data = fetching(source)
    for step in range(2):
        take(data, step)
    assert set(source.threads) == {threading.current_thread().name}
    assert source.fetched == [(s, i) for s in range(2) for i in (1, 0, 2)]
    assert capsys.readouterr().err.count("uses a global random number generator") == 1


def test_tensors_are_pinned_on_the_thread() -> None:
    pinned: list[str] = []

    def pin(tensor: Tensor) -> Tensor:
        pinned.append(threading.current_thread().name)
        return tensor + 0

    data = FetchAhead(Source().microbatch, (0, 1), 2, pin, 60.0, 0)
    fetch = data.begin(0)
    fetch(0, 0), fetch(0, 1)
    assert pinned == ["zbv-data_0"] * 2  # input and target
    data.close()


def executor_of(source: Source, ahead: int) -> Executor:
    plan = RankPlan.of("plan", unit_problem(1, 2), ORDERS, 0)
    model = hard_model()
    stages = build_stages(model, plan, CPU)
    fetch = model.microbatch

    def microbatch(step: int, index: int) -> tuple[Tensor, Tensor]:
        Source.microbatch(source, step, index)
        return fetch(step, index)

    source.microbatch = microbatch  # type: ignore[method-assign]  # the model's data, watched
    how = ExecutorOptions(fetch_ahead=ahead, last_step=9)
    return Executor(plan, stages, source, ThreadHub(1).transport(0), device=CPU, timeout=60, options=how)


@pytest.mark.parametrize("ahead", [0, 3])
def test_an_error_surfaces_at_the_action_that_needs_the_data(ahead: int) -> None:
    def before(step: int, index: int) -> None:
        if (step, index) == (1, 0):
            raise ValueError("no such file")

    source = Source()
    source.before = before
    executor = executor_of(source, ahead)
    executor.step(0)
    with pytest.raises(ValueError, match="no such file") as e:
        executor.step(1)
    assert e.value.__notes__ == ["rank 0, step 1, action 0F0"]
    executor.close()


def test_an_evaluation_never_runs_while_a_thread_fetches() -> None:
    source = Source()
    executor = executor_of(source, 3)
    executor.step(0)
    executor.evaluate(1)
    threads = {name for (step, _), name in zip(source.fetched, source.threads, strict=True) if step == 1}
    assert threading.current_thread().name in threads
    assert not [each for each in threading.enumerate() if each.name.startswith("zbv-data")]
    executor.step(1)
    executor.close()


def test_a_call_that_does_not_return_is_an_error_and_not_a_hang() -> None:
    source, ended = Source(), threading.Event()

    def before(step: int, index: int) -> None:
        if index == 2:
            ended.wait(60)

    source.before = before
    data = fetching(source, timeout=60)
    fetch = data.begin(3)
    fetch(3, 1), fetch(3, 0)
    data._timeout = 0.2  # not earlier, because on a busy machine the other calls may take as long
    with pytest.raises(WorkerError, match=r"microbatch\(3, 2\) did not return within 0\.2 s"):
        fetch(3, 2)
    ended.set()
    data._timeout = 60
    data.close()


def test_the_order_of_need_has_every_microbatch_once() -> None:
    plan = RankPlan.of("plan", unit_problem(1, 2), ORDERS, 0)
    assert order_of_need(lower(plan), (0, 1)) == (1, 0)
    middle = Orders.from_text([["0F0", "3F0", "3B0", "0B0"], ["1F0", "2F0", "2B0", "1B0"]])
    assert order_of_need(lower(RankPlan.of("plan", unit_problem(2, 1), middle, 1)), (0, 3)) == ()
