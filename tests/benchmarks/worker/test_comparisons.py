"""The findings of every comparison from the answers of its ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.plans import unit_problem
from zbv_solver.problem.problem import Units
from zbv_solver.search.assemble import baseline_plan
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search
from zbv_solver.verify.verifier import verify_orders
from zbv_worker.errors import WorkerError

from benchmarks.worker import gpt, overhead, packing, rehearse
from benchmarks.worker.memory import compare
from benchmarks.worker.rehearse import RehearseWorkload, torch_zbv

MS = 1_000_000


def turn(start: int, end: int, loss: float | None) -> dict[str, float | None]:
    return {"start": start * MS, "end": end * MS, "loss": loss}


def costs(stages: tuple[int, int], seconds: float) -> list[tuple[int, str, float]]:
    return [(stage, letter, seconds * (1 + (letter == "B"))) for stage in stages for letter in "FIWB"]


def turns(zbv_loss: float = 2.0, seconds: float = 0.001) -> gpt.Turns:
    others = ("ScheduleZBVZeroBubble", "ScheduleInterleaved1F1B", "Schedule1F1B")
    rank_0: dict[str, list[object]] = {name: [turn(10, 19, None)] for name in others}
    rank_1: dict[str, list[object]] = {name: [turn(11, 20, 2.0)] for name in others}
    rank_0 |= {gpt.OURS: [turn(0, 6, zbv_loss)], gpt.COSTS: [costs((0, 3), seconds)]}
    rank_1 |= {gpt.OURS: [turn(2, 8, None)], gpt.COSTS: [costs((1, 2), seconds)]}
    return gpt.Turns.of_ranks([rank_0, rank_1])


def test_a_turn_lasts_from_the_first_start_to_the_last_end_of_all_ranks() -> None:
    problem = unit_problem(2, 4)
    problem = replace(problem, costs=replace(problem.costs, p2p=(0.0,) * 3), units=Units("us", "bytes"))
    plan = search(problem, SearchOptions(effort="quick"))
    planned = plan.metrics.makespan  # F, I and W take 1 us, but 1 ms was measured
    found = gpt.findings(turns(), 2, plan)
    ratios = {finding.what.rpartition("zbv / ")[2]: finding.value for finding in found}
    assert ratios == pytest.approx(
        {
            "ScheduleZBVZeroBubble": 0.8,
            "ScheduleInterleaved1F1B": 0.8,
            "Schedule1F1B": 0.8,
            "its plan, costs measured in turns": 8 / planned,
            "its plan, costs measured before": 8000 / planned,
        }
    )
    assert [finding.target is None for finding in found] == [False, False, False, False, True]


def test_schedules_with_different_losses_are_an_error() -> None:
    turns(2.0).check_losses()
    with pytest.raises(WorkerError, match=r"step 0: the loss of Schedule\w+ is 2\.0.*that of zbv 2\.001"):
        turns(2.001).check_losses()


def test_a_step_takes_as_long_as_that_of_the_slowest_replica_and_rank() -> None:
    def replica(duration: float) -> packing.Replica:
        problem = unit_problem(2, 2)
        costs = problem.costs.mapped(lambda values: tuple(duration * each for each in values), (0.0,) * 3)
        return packing.Replica([[1]] * 2, search(replace(problem, costs=costs), SearchOptions("quick")))

    def times(*milliseconds: int) -> list[list[tuple[int, int]]]:
        return [[(0, each * MS), (5, 5 + each * MS), (0, 99 * MS)] for each in milliseconds]

    variants = {
        packing.OURS: [replica(1000.0), replica(1500.0)],
        packing.MEAN: [replica(2000.0), replica(1000.0)],
        packing.CLASSICAL: [replica(3000.0)] * 2,
    }
    rank_0 = {packing.OURS: times(10, 30), packing.MEAN: times(40, 10), packing.CLASSICAL: times(5, 30)}
    rank_1 = {packing.OURS: times(20, 10), packing.MEAN: times(30, 10), packing.CLASSICAL: times(60, 5)}
    found = {each.what: each.value for each in packing.findings(variants, [rank_0, rank_1])}
    gain = "gain over equal tokens, given order"
    assert found[f"{gain}, {packing.MEAN}, planned"] == pytest.approx(25)
    assert found[f"{gain}, {packing.MEAN}, measured"] == pytest.approx(25)
    assert found[f"{gain}, {packing.MEAN}, measured / planned"] == pytest.approx(1)
    assert found[f"{gain}, {packing.CLASSICAL}, planned"] == pytest.approx(50)
    assert found[f"{gain}, {packing.CLASSICAL}, measured"] == pytest.approx(50)


def test_overhead_is_cpu_time_per_action_beyond_a_plain_loop() -> None:
    def samples(microseconds: int) -> list[tuple[int, int]]:
        return [(10 * 1000 * microseconds, 10 * 1000 * (microseconds + 5))] * 3

    answer = {
        "zbv": samples(60),
        "torch with our split": samples(220),
        "torch as shipped": samples(180),
        "plain loop": samples(20),
        "plain loop with bare transfers": samples(45),
        "actions": 10,
    }
    found = {finding.what: finding.value for finding in overhead.findings(2, [answer, answer])}
    assert found["p=2: CPU per action beyond compute, executor's thread"] == pytest.approx(40)
    own = "p=2: CPU per action beyond compute and bare transfers"
    assert found[f"{own}, executor's thread"] == found[f"{own}, whole process"] == pytest.approx(15)
    assert found["p=2: zbv / torch with our split, whole process"] == pytest.approx(0.2)
    assert found["p=2: zbv / torch as shipped, whole process"] == pytest.approx(0.25)
    assert found["p=2: bare transfers / torch with our split, whole process"] == pytest.approx(0.125)


def test_a_rehearsal_is_compared_with_the_plan_in_total_and_by_part() -> None:
    rank = {"busy": 0.98, "planned_busy": 0.9, "between": 0.01, "waiting": 0.05, "planned_waiting": 0.1}
    outcome = {"planned": 1.0, "steps": [1.05, 1.04, 1.03], "ranks": [rank, rank]}
    total, *parts = rehearse.findings(RehearseWorkload(), outcome)
    assert total.value == pytest.approx(4.0)
    assert total.verdict == "missed by 1 %"
    assert [part.value for part in parts] == pytest.approx([8.0, 1.0, -5.0])
    assert sum(part.value for part in parts) == pytest.approx(total.value)


def test_memory_is_compared_rank_by_rank_above_and_below_the_plan() -> None:
    plan = baseline_plan("1f1b", RehearseWorkload().problem(2, 4))
    held = plan.metrics.peak_memory
    peaks = [round(1100 * held[0]), round(970 * held[1])]
    thousandfold = replace(plan.metrics, peak_memory=tuple(1000 * x for x in held))
    above, below = compare(replace(plan, metrics=thousandfold), 0.7, peaks)
    assert (above.value, below.value) == pytest.approx((10.0, 3.0))
    assert "rank 0: above planned" in above.what
    assert "rank 1: below planned" in below.what
    assert (above.excess > 0, below.excess > 0) == (True, False)


@pytest.mark.parametrize(("p", "microbatches"), [(2, 4), (4, 8), (8, 16)])
def test_pytorchs_order_is_a_plan_of_the_same_problem(p: int, microbatches: int) -> None:
    problem = RehearseWorkload().problem(p, microbatches)
    orders = torch_zbv(problem)
    verify_orders(problem, orders)
    assert len(orders) >= 2 * problem.n_stages * microbatches
