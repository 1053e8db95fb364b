"""Rehearsals with jitter: ranks sleep the simulated durations, and inputs arrive after their latencies.

The ranks are threads whose devices have virtual clocks, which jump to the end of a sleep. So the executor and
the transport are real, and times are exact.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from random import Random

import numpy as np
import pytest
import torch
from support.orders import random_orders
from support.problems import uniform
from support.thread_transport import ThreadHub
from zbv_solver.problem.jitter import Jitter, draw, drawn_costs
from zbv_solver.problem.problem import LETTERS
from zbv_worker.errors import Disagreement, InvalidRun
from zbv_worker.execution.plan_source import PlanSource
from zbv_worker.execution.timeline import Record
from zbv_worker.execution.whole_plan import WholePlan
from zbv_worker.measure.rehearse.delayed_stage import (
    DelayedStage,
    DelayedTimeline,
    Delays,
    DrawnTimes,
    ahead_of_rank_0,
)
from zbv_worker.measure.rehearse.rehearse import RehearseOptions, rehearse_on, simulate
from zbv_worker.measure.rehearse.sleeping_stage import SleepingDevice
from zbv_worker.tracing.clocks import Offset

SECOND = 10**9
NOISY = Delays(Jitter.of(action=0.3, transfer=0.5, rank=0.2), seed=7)


class VirtualDevice(SleepingDevice):
    """A device with a clock that only sleeps move; records what it slept."""

    def __init__(self) -> None:
        self.now = 0
        self.taken: list[int] = []
        self.due: list[int] = []
        super().__init__(lambda: self.now, lambda: 0, lambda: 0, self._jump)

    def _jump(self, due: int) -> None:
        self.now = max(self.now, due)

    def take(self, nanoseconds: int, arrival: int | None = None) -> int:
        self.taken.append(nanoseconds)
        self.due.append(super().take(nanoseconds, arrival))
        return self.due[-1]


def plan_of(p: int, m: int) -> WholePlan:
    problem = uniform(p, m, p2p=0.5)
    return WholePlan("aa", problem, random_orders(problem, Random(p)), objective_value=1.0)


def run(plan: WholePlan, each: list[RehearseOptions]) -> list[VirtualDevice]:
    """Rehearse with one thread per rank."""
    p = plan.problem.pp_degree
    hub, devices = ThreadHub(p), [VirtualDevice() for _ in range(p)]

    def rehearse(rank: int) -> None:
        device = devices[rank]
        transport, mine = hub.transport(rank), plan.of_rank(rank)
        rehearse_on(transport, each[rank], plan, mine, lambda: device.now, device)

    with ThreadPoolExecutor(p) as pool:
        list(pool.map(rehearse, range(p)))
    return devices


def options(delays: Delays | None = NOISY, size: int = 100) -> RehearseOptions:
    return RehearseOptions(PlanSource(), steps=2, scale=1.0, transfer_bytes=size, timeout=20, delays=delays)


@pytest.mark.parametrize(("p", "size"), [(1, 100), (3, 100), (4, 1)])
def test_ranks_sleep_the_simulated_durations_and_steps_take_the_simulated_time(p: int, size: int) -> None:
    plan, given = plan_of(p, 4), options(size=size)
    devices = run(plan, [given] * p)

    costs = [
        drawn_costs(plan.problem, draw(NOISY.jitter, plan.problem, NOISY.seed, (0,), step))[0]
        for step in range(3)
    ]
    for rank, device in enumerate(devices):
        actions = plan.orders.actions(rank)
        assert device.taken == [
            round(duration[LETTERS.index(letter), stage, j, 0] * SECOND)
            for duration in costs
            for stage, letter, j in actions
        ]

    ends = np.array([device.due[len(device.due) // 3 - 1 :: len(device.due) // 3] for device in devices])
    simulated = simulate(given, plan)
    assert simulated is not None
    assert np.diff(ends.max(axis=0)) / SECOND == pytest.approx(simulated.steps, rel=1e-6)


def test_durations_of_other_seeds_differ_and_without_jitter_they_are_the_planned_ones() -> None:
    plan = plan_of(2, 3)
    planned, still, *noisy = (
        [device.taken for device in run(plan, [options(delays)] * 2)]
        for delays in (None, Delays(Jitter()), NOISY, Delays(NOISY.jitter, seed=8))
    )
    assert planned == still
    assert noisy[0] != noisy[1]


def test_ranks_with_different_draws_refuse() -> None:
    with pytest.raises(Disagreement, match="seed"):
        run(plan_of(2, 2), [options(NOISY), options(Delays(NOISY.jitter, seed=8))])


def test_a_jitter_for_other_ranks_is_refused() -> None:
    jitter = Jitter(rank=NOISY.jitter.rank * 3)
    with pytest.raises(InvalidRun, match=r"--jitter.* 3 values; must be one, or one per rank \(2\)"):
        simulate(options(Delays(jitter)), plan_of(2, 2))


def test_an_input_arrives_after_its_latency_on_the_clock_of_every_rank() -> None:
    plan = plan_of(2, 2)
    devices, ahead = [VirtualDevice(), VirtualDevice()], [0, 100 * SECOND]
    devices[1].now += ahead[1]
    times = [DrawnTimes(plan, rank, NOISY, 1.0, 1) for rank in range(2)]
    producer = DelayedStage(0, times[0], 8, None, devices[0], ahead[0])
    consumer = DelayedStage(1, times[1], 8, 8, devices[1], ahead[1])
    sent = producer.forward(0, torch.zeros(()), split=True)
    consumer.forward(0, sent, split=True)
    arrival = devices[0].due[0] + times[1].of_input("F", 1, 0)
    assert devices[1].due[0] - ahead[1] == arrival + times[1].of_action("F", 1, 0)

    # The trace counts the latency as waiting.
    action = plan.orders.actions(1)[0]
    marks = [Record(action, ahead[1], ahead[1], devices[1].due[0]), Record(action, 0, 0, 0)]
    found, end = DelayedTimeline(lambda: 0, times[1]).resolved(marks, [])
    assert (found.wait, found.start) == (ahead[1], ahead[1] + arrival)
    assert end == marks[1]


def test_clocks_that_may_be_the_same_are_taken_as_the_same() -> None:
    assert ahead_of_rank_0(Offset(0, -40, 50)) == 0
    assert ahead_of_rank_0(Offset(0, 5 * SECOND, 50)) == 5 * SECOND
