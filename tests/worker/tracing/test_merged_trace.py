"""One trace of all ranks: on one clock, in the plan's order, in a format that viewers read."""

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
from support.thread_transport import ThreadHub
from zbv_solver.plans.orders import Action
from zbv_worker.errors import InvalidRun
from zbv_worker.execution.plan_source import PlanSource, WholePlan
from zbv_worker.measure.rehearse.rehearse import RehearseOptions, rehearse_on
from zbv_worker.tracing.merged_trace import Alignment, Clock, Offset, RankTrace, claim, render

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
    assert [event["name"] for event in events if event["tid"] == 1] == [
        "1F0",
        "wait for the input of 1B0",
        "1B0",
        "wait for the input of 1F0",
        "1F0",
        "1B0",
    ]
    waited, backward = events[1:3]
    assert (waited["ts"], waited["dur"], waited["cat"]) == (2.5, 0.5, "waiting")
    assert (backward["ts"], backward["dur"], backward["cat"]) == (3.0, 2.0, "full backward")
    assert backward["args"] == {
        "stage": 0,
        "microbatch": 0,
        "letter": "B",
        "step": 0,
        "wait": 0.5,
        "received_bytes": 64,
    }
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


SHIFTS = (0, 5 * SECOND, -2 * SECOND)


def shifted(by: int) -> Clock:
    return lambda: time.perf_counter_ns() + by


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> tuple[WholePlan, dict[str, Any]]:
    """A rehearsal whose ranks' clocks are seconds apart: the plan and the trace."""
    problem, orders = random_plan(3, 3, seed=5)
    plan = WholePlan("aa", problem, orders, objective_value=18.0)
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    options = RehearseOptions(PlanSource(), steps=2, scale=1e-3, transfer_bytes=100, timeout=60, trace=path)
    hub = ThreadHub(3)

    def rehearse(rank: int) -> object:
        clock = shifted(SHIFTS[rank])
        return rehearse_on(hub.transport(rank), options, plan, plan.of_rank(rank), clock)

    with ThreadPoolExecutor(3) as pool:
        outcomes = list(pool.map(rehearse, range(3)))
    assert [outcome is not None for outcome in outcomes] == [True, False, False]
    return plan, json.loads(path.read_text())


def test_every_rank_runs_its_list_in_order_and_one_action_at_a_time(
    merged: tuple[WholePlan, dict[str, Any]],
) -> None:
    plan, document = merged
    for rank in range(3):
        events = [event for event in complete_events(document) if event["tid"] == rank]
        actions = [event["name"] for event in events if event["cat"] != "waiting"]
        assert actions == plan.orders.text(rank) * 3
        for earlier, later in pairwise(events):
            assert earlier["ts"] + earlier["dur"] <= later["ts"] + 1e-3  # rounding of the sum


def test_no_action_starts_before_its_input_despite_clock_offsets(
    merged: tuple[WholePlan, dict[str, Any]],
) -> None:
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
            made = (
                [f"{action.stage - 1}F"] if action.letter == "F" else [f"{action.stage + 1}{c}" for c in "IB"]
            )
            producer = next(
                events[step, key] for m in made if (step, key := f"{m}{action.microbatch}") in events
            )
            assert producer["tid"] != event["tid"]
            assert producer["ts"] + producer["dur"] <= event["ts"] + slack
            remote += 1
    assert remote == 3 * 8 * 3  # of 3 steps, both ways over the 4 boundaries between ranks, 3 microbatches
