"""One trace of all ranks: on one clock, in the plan's order, in a format that viewers read.

Clock offsets are exact for symmetric messages, and their error never exceeds the stated one.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.plans import random_plan
from support.thread_transport import ThreadHub, ThreadTransport
from zbv_solver.plans.orders import Action
from zbv_worker.errors import InvalidRun
from zbv_worker.execution.plan_source import PlanSource, WholePlan
from zbv_worker.measure.rehearse.rehearse import RehearseOptions, rehearse_on
from zbv_worker.tracing.merged_trace import Alignment, Clock, Offset, RankTrace, claim, find_offsets, render

SECOND = 1_000_000_000
SAME = Alignment((Offset(),) * 2, (Offset(),) * 2)


def small_trace(rank: int, plan_id: str = "aa") -> RankTrace:
    times = [[(1_000, 1_000, 3_000), (3_500, 4_000, 6_000)], [(6_000, 7_000, 9_000), (9_000, 9_000, 9_500)]]
    return RankTrace(
        plan_id,
        rank,
        (Action(rank, "F", 0), Action(rank, "B", 0)),
        np.array(times, dtype=np.int64) + 7 * SECOND,
        np.array([[0, 64], [0, 64]]),
    )


def complete_events(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in document["traceEvents"] if event["ph"] == "X"]


def test_events_carry_action_step_wait_and_bytes_in_microseconds_from_the_first() -> None:
    document = json.loads(render([[small_trace(0), small_trace(1)]], SAME))
    events = complete_events(document)
    found, wait = [event["name"] for event in events if event["tid"] == 1], "wait for the input of"
    assert found == ["1F0", f"{wait} 1B0", "1B0", f"{wait} 1F0", "1F0", "1B0"]
    waited, backward = events[1:3]
    assert (waited["ts"], waited["dur"], waited["cat"]) == (2.5, 0.5, "waiting")
    assert (backward["ts"], backward["dur"], backward["cat"]) == (3.0, 2.0, "full backward")
    place = {"stage": 0, "microbatch": 0, "letter": "B", "step": 0}
    assert backward["args"] == {**place, "wait": 0.5, "received_bytes": 64}
    names = [event["args"]["name"] for event in document["traceEvents"] if event["name"] == "thread_name"]
    assert names == ["rank 0", "rank 1"]


def test_plans_that_take_turns_are_processes_of_one_trace() -> None:
    document = json.loads(render([[small_trace(0)], [small_trace(0, "bb")]], SAME))
    assert {event["pid"] for event in complete_events(document)} == {0, 1}
    assert document["otherData"]["plan_ids"] == ["aa", "bb"]


def test_an_unwritable_output_is_named_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRun, match=r"--trace .*file/trace.json"):
        claim(tmp_path / "file" / "trace.json")


class Post(ThreadTransport):
    """Rank 0 of two on a simulated clock; ``delays`` has the times of the messages there and back."""

    def __init__(self, delays: list[tuple[int, int]], ahead: int):
        super().__init__(ThreadHub(2), 0)
        self.now = 5 * SECOND
        self._delays = delays
        self._ahead = ahead
        self._turn = -1

    def clock(self) -> int:
        return self.now

    def tell(self, peer: int, value: int, timeout: float) -> None:
        self._turn += 1
        self.now += self._delays[self._turn][0]

    def hear(self, peer: int, timeout: float) -> int:
        shown = self.now + self._ahead
        self.now += self._delays[self._turn][1]
        return shown

    def gather(self, value: Any, timeout: float) -> list[Any]:
        return [value, None]

    def barrier(self, timeout: float) -> None: ...


def test_the_shortest_exchange_counts_and_a_symmetric_one_is_exact() -> None:
    post = Post([(400, 20), (30, 30), (50, 900)], ahead=-7_000)
    first, second = find_offsets(post, 1.0, post.clock, exchanges=3)
    assert (first.ahead, first.uncertainty) == (0, 0)
    assert (second.ahead, second.uncertainty) == (-7_000, 30)


@pytest.mark.parametrize("delays", [(0, 100), (100, 0), (33, 68)])
def test_the_error_of_an_asymmetric_exchange_is_at_most_its_uncertainty(delays: tuple[int, int]) -> None:
    post = Post([delays], ahead=12_345)
    found = find_offsets(post, 1.0, post.clock, exchanges=1)[1]
    assert abs(found.ahead - 12_345) <= found.uncertainty <= 51


def shifted(by: int) -> Clock:
    return lambda: time.perf_counter_ns() + by


def test_shifted_clocks_of_running_ranks_are_recovered_on_every_rank() -> None:
    shifts = (0, 5 * SECOND, -3 * SECOND, 17)
    answers = ThreadHub(4).run(lambda rank: find_offsets(rank, 10.0, shifted(shifts[rank.rank])))
    assert answers[1:] == answers[:1] * 3
    for offset, shift in zip(answers[0], shifts, strict=True):
        assert abs(offset.ahead - shift) <= offset.uncertainty


def test_a_rank_that_does_not_answer_ends_the_exchange() -> None:
    hub = ThreadHub(2)
    with ThreadPoolExecutor(1) as pool:
        barrier_only = pool.submit(hub.transport(1).barrier, 10.0)
        with pytest.raises(TimeoutError):
            find_offsets(hub.transport(0), 0.2)
        barrier_only.result(60)


def test_times_are_corrected_for_the_drift_between_two_measurements() -> None:
    origin = 2**60  # a clock that has run for decades: floats would round to 128 ns
    before = (Offset(origin), Offset(origin, ahead=1_000))
    after = (Offset(origin + SECOND), Offset(origin + SECOND, ahead=3_000))
    times = np.array([[origin, origin + SECOND // 2], [origin + SECOND, origin + 2 * SECOND]])
    alignment = Alignment(before, after)
    assert (alignment.to_rank_0(0, times) == times).all()
    assert (times - alignment.to_rank_0(1, times)).tolist() == [[1_000, 2_000], [3_000, 5_000]]


SHIFTS = (0, 5 * SECOND, -2 * SECOND)


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> tuple[WholePlan, dict[str, Any]]:
    """A rehearsal whose ranks' clocks are seconds apart: the plan and the trace."""
    problem, orders = random_plan(3, 3, seed=5)
    plan = WholePlan("aa", problem, orders, objective_value=18.0)
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    options = RehearseOptions(PlanSource(), steps=2, scale=1e-3, transfer_bytes=100, timeout=60, trace=path)

    def rehearse(transport: ThreadTransport) -> object:
        rank = transport.rank
        return rehearse_on(transport, options, plan, plan.of_rank(rank), shifted(SHIFTS[rank]))

    outcomes = ThreadHub(3).run(rehearse)
    assert [outcome is not None for outcome in outcomes] == [True, False, False]
    return plan, json.loads(path.read_text())


def test_every_rank_runs_its_list_in_order(merged: tuple[WholePlan, dict[str, Any]]) -> None:
    plan, document = merged
    for rank in range(3):
        events = [event for event in complete_events(document) if event["tid"] == rank]
        actions = [event["name"] for event in events if event["cat"] != "waiting"]
        assert actions == plan.orders.text(rank) * 3
        for earlier, later in pairwise(events):
            assert earlier["ts"] + earlier["dur"] <= later["ts"] + 1e-3  # rounding of the sum


def test_no_action_starts_before_its_input(merged: tuple[WholePlan, dict[str, Any]]) -> None:
    _, document = merged
    ahead = [SECOND / 1e3 * shift / SECOND for shift in SHIFTS]
    other = document["otherData"]
    slack = 2 * other["clock_uncertainty_us"]
    for found, shift in zip(other["clocks_ahead_us"], ahead, strict=True):
        assert abs(found - shift) <= slack
    events = {
        (event["args"]["step"], event["name"]): event
        for event in complete_events(document)
        if event["cat"] != "waiting"
    }
    remote = 0
    for (step, name), event in events.items():
        if event["args"]["received_bytes"]:
            action = Action.parse(name)
            place, letters = (-1, "F") if action.letter == "F" else (1, "IB")
            made = [(step, f"{action.stage + place}{c}{action.microbatch}") for c in letters]
            producer = next(events[key] for key in made if key in events)
            assert producer["tid"] != event["tid"]
            assert producer["ts"] + producer["dur"] <= event["ts"] + slack
            remote += 1
    assert remote == 3 * 8 * 3  # of 3 steps, both ways over the 4 boundaries between ranks, 3 microbatches
