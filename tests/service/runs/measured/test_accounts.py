"""Accounts of measured steps: the parts add up to the difference on every rank."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.measured_steps import noisy_traces
from support.orders import random_orders
from support.problems import problems, uniform
from support.rank_traces import trace_documents
from zbv_service.runs.measured.accounts import account, kind_times
from zbv_service.runs.measured.step import (
    MeasuredStep,
    clock_conflict,
    lay_out,
    nanoseconds_of_unit,
    sources,
    step_length,
    typical,
)
from zbv_solver.errors import InvalidInput
from zbv_solver.measure.rank_trace import RankTrace, parse_rank_trace
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import Objective, Problem, Units
from zbv_solver.search.assemble import make_plan
from zbv_solver.timing.start_times import span_start_times

MICROSECOND = 1000.0


def plan_of(problem: Problem, seed: int = 1) -> Plan:
    named = replace(problem, units=Units(time="us"))
    return make_plan(named, random_orders(named, Random(seed)), method="random")


def noisy(plan: Plan, seed: int, steps: int = 1) -> list[RankTrace]:
    return [parse_rank_trace(document) for document in noisy_traces(plan, seed, steps=steps)]


def as_planned(plan: Plan, problem: Problem | None = None, **how: object) -> list[RankTrace]:
    made = trace_documents(problem or plan.problem, plan.orders, plan_id=plan.plan_id, **how)  # type: ignore[arg-type]
    return [parse_rank_trace(document) for document in made]


@given(problems(max_p=3, max_m=4), st.integers(0, 1000))
def test_the_parts_of_every_rank_add_up_to_the_difference(problem: Problem, seed: int) -> None:
    plan = plan_of(problem, seed)
    step = lay_out(plan, noisy(plan, seed), 0, MICROSECOND)
    found = account(plan, step)
    assert found.planned == plan.objective
    assert found.measured == step_length(plan, step)
    for row in found.ranks:
        assert row.planned.total == pytest.approx(found.planned, abs=1e-6)
        assert row.measured.total == pytest.approx(found.measured, abs=1e-6)
        assert row.difference.total == pytest.approx(found.difference, abs=1e-6)
        assert row.measured.without_transfer().total == pytest.approx(found.measured, abs=1e-6)
        for parts in (row.planned, row.measured):
            rounding = 1e-12 * (1 + found.measured)
            assert min(parts.compute, parts.transfer, parts.waiting, parts.between) >= -rounding


@given(problems(max_p=3, max_m=3), st.integers(0, 1000))
def test_each_part_matches_the_records(problem: Problem, seed: int) -> None:
    """Compares the parts with sums over the single records."""
    plan = plan_of(problem, seed)
    traces = noisy(plan, seed)
    step = lay_out(plan, traces, 0, 1.0)
    found = account(plan, step)
    end_of = {
        text: int(times[2])
        for trace in traces
        for text, times in zip(trace.steps[0].orders.text(0), trace.steps[0].times, strict=True)
    }
    source = sources(plan)
    texts = [text for texts in plan.orders.all_text() for text in texts]
    for row, trace in zip(found.ranks, traces, strict=True):
        times = trace.steps[0].times
        begin = plan.orders.slice_of(row.rank).start
        first = (
            times[0, 1] if plan.problem.objective == "span" else min(t.steps[0].times[0, 1] for t in traces)
        )
        transfer, still = 0, 0
        for index, (turned, start, _) in enumerate(times.tolist()):
            since = turned if index else int(first)
            still += start - since
            made = source[begin + index]
            if made >= 0:
                transfer += start - max(since, min(start, end_of[texts[made]]))
        assert row.measured.compute == (times[:, 2] - times[:, 1]).sum()
        assert row.measured.between == (times[1:, 0] - times[:-1, 2]).sum()
        assert row.measured.transfer == transfer
        slack = first + found.measured - times[-1, 2]
        assert row.measured.waiting == pytest.approx(still - transfer + slack)


@given(problems(max_p=4, max_m=4), st.integers(0, 1000))
def test_a_step_as_planned_has_no_difference(problem: Problem, seed: int) -> None:
    plan = plan_of(problem, seed)
    orders = plan.orders
    tolerance = 1e-6 * (1 + plan.objective)
    if plan.problem.objective == "makespan":
        tolerance += 1e-3 * len(orders)  # traces have whole nanoseconds; the plan's unit is a microsecond
        (step,) = (lay_out(plan, as_planned(plan), 0, MICROSECOND),)
    else:
        start = span_start_times(plan.problem, orders)
        end = start + plan.problem.arrays.durations(orders.stage, orders.letter, orders.microbatch)
        turned = np.concatenate(
            [
                np.concatenate((start[part][:1], end[part][:-1]))
                for part in map(orders.slice_of, range(orders.pp_degree))
            ]
        )
        step = MeasuredStep(0, 0, turned, start, end, tuple(range(orders.pp_degree)), 0.0)
    found = account(plan, step)
    assert found.difference == pytest.approx(0, abs=tolerance)
    for row in found.ranks:
        for part in vars(row.difference).values():
            assert part == pytest.approx(0, abs=tolerance)


@pytest.mark.parametrize("objective", ["span", "makespan"])
def test_ranks_without_a_trace_are_left_out(objective: Objective) -> None:
    plan = plan_of(uniform(3, 5, p2p=0.5, objective=objective))
    traces = as_planned(plan)
    step = lay_out(plan, [traces[0], traces[2]], 0, MICROSECOND)
    assert step.ranks == (0, 2)
    assert np.isnan(step.start[plan.orders.slice_of(1)]).all()
    found = account(plan, step)
    assert [row.rank for row in found.ranks] == [0, 2]
    for row in found.ranks:
        assert row.difference.total == pytest.approx(found.difference)
    assert {kind.rank for kind in kind_times(plan, [step])} == {0, 2}


def test_durations_are_listed_by_rank_and_letter() -> None:
    problem = uniform(2, 4)
    plan = plan_of(problem)
    costs = replace(problem.costs, forward=(1.0, 2.0, 1.0, 1.0))
    steps = [
        lay_out(plan, as_planned(plan, replace(problem, costs=costs), steps=3), at, MICROSECOND)
        for at in range(3)
    ]
    found = {(kind.rank, kind.letter): kind for kind in kind_times(plan, steps)}
    assert found[0, "F"].ratio == pytest.approx(1.0)
    assert (found[1, "F"].planned, found[1, "F"].measured) == (1.0, 1.5), (
        "stage 1 takes twice, stage 2 does not"
    )
    assert found[1, "F"].count == 8


def test_the_typical_step_is_a_measured_one() -> None:
    plan = plan_of(uniform(2, 4))
    traces = noisy(plan, 3, steps=5)
    steps = [lay_out(plan, traces, at, MICROSECOND) for at in range(5)]
    lengths = sorted(step_length(plan, step) for step in steps)
    assert step_length(plan, typical(plan, steps)) == lengths[2]
    assert step_length(plan, typical(plan, steps[:2])) == min(step_length(plan, step) for step in steps[:2])


def test_a_named_unit_is_used_and_any_other_is_fitted() -> None:
    plan = plan_of(uniform(2, 4))
    assert nanoseconds_of_unit(plan, as_planned(plan)) == (1000.0, True)
    bare = make_plan(uniform(2, 4), plan.orders, method="random")
    nanoseconds, is_named = nanoseconds_of_unit(bare, as_planned(bare))
    assert nanoseconds == pytest.approx(1000.0)
    assert not is_named


def test_contradicting_clocks_are_detected() -> None:
    plan = plan_of(uniform(2, 4, p2p=0.5))
    agreed = lay_out(plan, as_planned(plan), 0, MICROSECOND)
    assert clock_conflict(plan, agreed).count == 0
    assert clock_conflict(plan, agreed).inputs == int((sources(plan) >= 0).sum())
    documents = trace_documents(plan.problem, plan.orders, plan_id=plan.plan_id, ahead=[0, -20_000])
    documents[1]["clock_offset_ns"] = 0
    found = clock_conflict(
        plan, lay_out(plan, [parse_rank_trace(document) for document in documents], 0, MICROSECOND)
    )
    assert found.count > 0
    assert found.worst == pytest.approx(20.0 - 0.5)
    # Of what the clocks do not know, nobody can say that it is wrong; the worse of them counts.
    documents[1]["uncertainty_ns"] = 30_000
    vague = lay_out(plan, [parse_rank_trace(document) for document in documents], 0, MICROSECOND)
    assert (vague.uncertainty, clock_conflict(plan, vague).count) == (30.0, 0)


def test_a_step_that_is_not_the_plans_is_refused() -> None:
    plan, other = plan_of(uniform(2, 4), 1), plan_of(uniform(2, 4), 2)
    documents = trace_documents(plan.problem, plan.orders, plan_id=plan.plan_id)
    for document in documents:
        document["steps"][0]["actions"] = []
    for traces, step, message in (
        ([parse_rank_trace(document) for document in documents], 0, "ran 0 actions"),
        (as_planned(other), 0, "not its list of plan"),
        (as_planned(plan_of(uniform(3, 4)))[2:], 0, "ranks 0 to 1"),
        (as_planned(plan), 9, "step 9"),
    ):
        with pytest.raises(InvalidInput, match=message):
            lay_out(plan, traces, step, MICROSECOND)


def test_sources_are_the_producers_on_other_ranks() -> None:
    plan = plan_of(uniform(3, 3))
    found, placement = sources(plan), plan.problem.placement
    texts = [text for texts in plan.orders.all_text() for text in texts]
    for at, text in enumerate(texts):
        (action,) = Orders.from_text([[text]]).actions(0)
        step = {"F": -1, "I": 1, "B": 1, "W": 0}[action.letter]
        near = action.stage + step
        is_remote = step and 0 <= near < 6 and placement.rank_of[near] != placement.rank_of[action.stage]
        if not is_remote:
            assert found[at] == -1
            continue
        letters = ("F",) if action.letter == "F" else ("I", "B")
        assert texts[found[at]] in {f"{near}{letter}{action.microbatch}" for letter in letters}
