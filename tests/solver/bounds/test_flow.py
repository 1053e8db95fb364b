"""The flow through the first and the last rank: every plan is a solution of its programme."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.orders import copied_at_random, paired_at_random, random_orders
from support.problems import uniform, with_communication, with_copies
from zbv_solver.bounds import lower_bound
from zbv_solver.bounds.flow import Action, Programme, Window, activities
from zbv_solver.errors import InvalidPlan
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.numeric import OPTIMAL_GAP
from zbv_solver.problem.problem import B, I, Problem, W
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search
from zbv_solver.timing.start_times import Timing, copy_times, evaluate

TINY = 1e-6


@settings(max_examples=300)
@given(with_communication() | with_copies(), st.integers(0, 2**32))
def test_what_a_plan_runs_in_every_step_satisfies_all_rows(problem: Problem, seed: int) -> None:
    """Lemma 66: so no prices disprove the plan's objective."""
    assume(problem.pp_degree > 1)
    random = Random(seed)
    changed = paired_at_random if problem.copies is None else copied_at_random
    orders = changed(random_orders(problem, random), random)
    try:
        timing = evaluate(problem, orders)
    except InvalidPlan:
        return
    assume(timing.makespan > 0)
    problem = replace(problem, memory=replace(problem.memory, limit=timing.peak_memory))
    last, of_rank = problem.pp_degree - 1, orders.rank_index()
    begin, end = (
        [float(pick(times[of_rank == rank])) for rank in (0, last)]
        for pick, times in ((np.min, timing.start), (np.max, timing.end))
    )
    objective = max(end[0] - begin[0], end[1] - begin[1])
    windows = {0: Window(0.0, 0.0), last: Window(begin[1], begin[1])}
    step = random.uniform(0.02, 1.5) * max(float(problem.arrays.duration.max()), objective / 50)
    programme = Programme(problem, windows, step, math.ceil(max(end) / step) + 1)
    found = solution(problem, programme, orders, timing)

    sums = np.array([found[columns] @ np.array(values) for columns, values in programme.rows])
    largest = programme.right_sides(objective)
    assert (sums <= largest + TINY).all()
    np.testing.assert_allclose(sums[programme.is_exact], largest[programme.is_exact], atol=TINY)
    assert (found <= np.array(programme.most) + TINY).all()
    prices = np.array([random.choice([0.0, random.uniform(-1, 3)]) for _ in sums])
    assert not programme.is_disproved(prices, objective)


def solution(problem: Problem, programme: Programme, orders: Orders, timing: Timing) -> Any:
    """The columns of a plan: how much of every activity runs in a step, and of every action by its end."""
    found, ends = np.zeros(len(programme.most)), np.arange(1, programme.steps + 1) * programme.step

    def done(start: float, stop: float) -> Any:
        length = stop - start
        return ((ends - start) / length).clip(0.0, 1.0) if length > 0 else (ends >= start) * 1.0

    duration = {
        activity.runs: activity.duration
        for rank in programme.windows
        for activity in activities(problem, rank)
    }
    for runs, begin, end in entries(orders, timing, programme):
        split = tuple(action for action in runs if action[0] != W)
        pieces = [(runs, begin, end)]
        if runs not in programme.run:  # I and then W take as long as this B
            weights = runs[-1:]
            middle = begin + duration[split]
            pieces = [(split, begin, middle), (weights, middle, middle + duration[weights])]
            assert pieces[-1][-1] <= end * (1 + TINY) + TINY
        for part, start, stop in pieces:
            found[list(programme.run[part])] += np.diff(done(start, stop), prepend=0.0)
            for action in part:
                found[list(programme.flown[action])] += done(start, stop)
    if orders.copies is not None:
        for (_, letter, stage, _), (start, stop) in zip(
            orders.copies.tolist(), copy_times(problem, orders).tolist(), strict=True
        ):
            if (letter, stage) in programme.flown:  # where memory may bind
                found[list(programme.flown[letter, stage])] += done(start, stop)
    return found


def entries(
    orders: Orders, timing: Timing, programme: Programme
) -> Iterator[tuple[tuple[Action, ...], float, float]]:
    """What the two ranks run, with start and end; the programme has an I and a W for a B."""
    of_rank, skipped = orders.rank_index(), -1
    for index in range(len(orders)):
        if of_rank[index] not in programme.windows or index == skipped:
            continue
        is_pair = orders.paired is not None and orders.paired[index]
        skipped = index + 1 if is_pair else -1
        runs = []
        for each in range(index, index + 1 + is_pair):
            letters = (I, W) if orders.letter[each] == B else (int(orders.letter[each]),)
            runs += [(letter, int(orders.stage[each])) for letter in letters]
        yield tuple(runs), float(timing.start[index]), float(timing.end[index])


def test_pairs_of_the_last_rank_limit_those_of_the_first() -> None:
    hidden = {"forward": 8.1, "backward_input": 8.1, "backward": 8.1}
    costs = {"forward": 18, "backward_input": 18, "backward_weight": 12, "communication": hidden}
    problem = uniform(8, 16, limit=17, costs=costs)
    assert lower_bound(problem).value == pytest.approx(1276.8)
    best = lower_bound(problem, "thorough")
    assert best.value > 1320
    assert "ranks 0 and 7" in best.reason
    assert 1300 <= lower_bound(problem, "thorough", enough=1300).value <= best.value
    # A search knows an order, and a proof of its plan does not.
    assert lower_bound(problem, "thorough", enough=1400) == best
    assert lower_bound(problem, "thorough", is_stopped=lambda: True).value == pytest.approx(1276.8)


@pytest.mark.parametrize(
    "costs", [{"forward": [0, 1]}, {"forward": 0, "backward_input": 0}, {"backward_weight": 0}]
)
def test_actions_that_take_no_time(costs: dict[str, Any]) -> None:
    parts = {"forward": 1, "backward_input": 1, "backward_weight": 1} | costs
    problem = uniform(2, 3, costs=parts | {"communication": {"backward_input": parts["backward_input"]}})
    best = search(problem, SearchOptions(effort="quick")).objective
    assert lower_bound(problem, "thorough").value <= best * (1 + OPTIMAL_GAP)
