"""A rehearsal's evaluation of traces: step lengths, where time went, and transfers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.stages import Costs, Memory, Placement
from zbv_worker.execution.plan_source import WholePlan
from zbv_worker.measure.rehearse.outcome import (
    CpuUse,
    Outcome,
    RankTimes,
    compare,
    outcome_json,
    sentences,
    table,
)
from zbv_worker.tracing.merged_trace import RankTrace

MS = 1_000_000
PLACEMENT = Placement.of("single", 2)
PROBLEM = Problem(PLACEMENT, 1, Costs((2, 2), (3, 3), (1, 1), (0.5,)), Memory.unlimited(PLACEMENT))
ORDERS = Orders.from_text([["0F0", "0I0", "0W0"], ["1F0", "1I0", "1W0"]])
PLAN = WholePlan("ab" * 32, PROBLEM, ORDERS, objective_value=11.0)

# wait, start, end of F, I, W; a step of rank 0, and of rank 1.
RANK_0 = [(0, 0, 2), (2, 8, 11), (11, 11, 12)]
RANK_1 = [(0, 3, 5), (5, 5, 8), (9, 9, 10)]


def trace(rank: int, rows: list[tuple[int, int, int]], shifts: list[int]) -> RankTrace:
    times = np.array([[[at + shift for at in row] for row in rows] for shift in shifts], dtype=np.int64) * MS
    received = np.array([[0, 64, 0] if rank == 0 else [64, 0, 0]] * len(shifts))
    return RankTrace("ab" * 32, rank, tuple(ORDERS.actions(rank)), times, received)


def outcome(plan: WholePlan = PLAN, shifts: tuple[int, ...] = (0, 12, 25, 37)) -> Outcome:
    traces = [trace(0, RANK_0, list(shifts)), trace(1, RANK_1, list(shifts))]
    cpu = [CpuUse(3_000, 6_000, 3), CpuUse(9_000, 12_000, 3)]
    return compare(plan, 1e-3, traces, cpu, clock_uncertainty=0.0)


def test_a_span_is_measured_from_the_end_of_one_step_to_the_end_of_the_next() -> None:
    found = outcome()
    assert found.steps == pytest.approx((12e-3, 13e-3, 12e-3))
    assert found.measured == pytest.approx(12e-3)
    assert found.planned == pytest.approx(11e-3)
    assert found.ratio == pytest.approx(12 / 11)


def test_a_makespan_is_measured_from_a_steps_first_start_to_its_last_end() -> None:
    plan = replace(PLAN, problem=replace(PROBLEM, objective="makespan"))
    assert outcome(plan, (0, 100, 350)).steps == pytest.approx((12e-3, 12e-3))


def test_a_ranks_step_is_divided_into_actions_waiting_and_the_rest() -> None:
    first, second = outcome().ranks
    assert (first.busy, first.planned_busy, first.between) == pytest.approx((6e-3, 6e-3, 0.0))
    assert (first.waiting, first.planned_waiting) == pytest.approx((6e-3, 5e-3))
    assert first.unplanned_waiting == pytest.approx(1e-3)
    assert (second.waiting, second.between) == pytest.approx((5e-3, 1e-3))
    for rank in (first, second):
        explained = rank.busy - rank.planned_busy + rank.between + rank.unplanned_waiting
        assert explained == pytest.approx(outcome().measured - outcome().planned)


def test_transfers_that_were_waited_for_are_timed_per_pair_of_ranks() -> None:
    down, up = outcome().links
    assert (down.sender, down.receiver, down.count) == (0, 1, 3)
    assert down.median == pytest.approx(1e-3)  # from the end of 0F0 at 2 to the start of 1F0 at 3
    assert (up.sender, up.receiver, up.count) == (1, 0, 3)
    assert up.median == pytest.approx(0.0, abs=1e-12)
    assert up.planned == pytest.approx(0.5e-3)


def test_a_transfer_that_arrived_early_is_not_timed() -> None:
    late = [(0, 0, 2), (9, 9, 11), (11, 11, 12)]
    traces = [trace(0, late, [0, 12]), trace(1, RANK_1, [0, 12])]
    links = compare(PLAN, 1e-3, traces, [CpuUse(1, 1, 3)] * 2, 0.0).links
    assert [(link.sender, link.receiver) for link in links] == [(0, 1)]


def test_cpu_time_is_per_action_of_all_ranks() -> None:
    assert (outcome().cpu_thread, outcome().cpu_process) == pytest.approx((2e-6, 3e-6))


def test_the_report_names_the_plan_both_times_and_the_slowest_pair() -> None:
    text = "\n".join(sentences(outcome()))
    for expected in (
        "span of plan abababababab",
        "planned 11 ms",
        "measured 12 ms",
        "+9.1\u202f%",
        "0 → 1: median 1 ms",
    ):
        assert expected in text
    assert table(outcome()).row_count == 2
    rounded = replace(outcome(), ranks=(RankTimes(0, 1.0, 1.0, 0.0, -1e-12, 0.0),))
    assert [*table(rounded).columns[4].cells] == ["0.0"]
    assert outcome_json(outcome())["ranks"][1]["rank"] == 1
