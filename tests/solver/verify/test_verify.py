"""The verifier accepts exactly the orders that a plain reference can execute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.orders import random_orders
from support.paths import TESTS
from support.problems import limited, problems, uniform
from support.reference import Impossible, largest_cycle_mean, peak_memory, reach, simulate
from zbv_solver.construct.dispatch import priority_schedules
from zbv_solver.errors import InvalidPlan
from zbv_solver.plans.orders import Action, Orders
from zbv_solver.plans.plan import Metrics, Plan, plan_json
from zbv_solver.problem.problem import Problem
from zbv_solver.search.assemble import make_plan
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search
from zbv_solver.verify.graph import PrecedenceGraph, earliest, refuting_cycle, respects_inputs
from zbv_solver.verify.verifier import verify, verify_orders

Ranks = list[list[Action]]
GOOD = [
    ["0F0", "3F0", "3I0", "3W0", "0B0"],
    ["1F0", "2F0", "2I0", "1I0", "1W0", "2W0"],
]


def swap(ranks: Ranks, random: Random) -> None:
    rank = random.choice(ranks)
    a, b = random.randrange(len(rank)), random.randrange(len(rank))
    rank[a], rank[b] = rank[b], rank[a]


def drop(ranks: Ranks, random: Random) -> None:
    rank = random.choice(ranks)
    del rank[random.randrange(len(rank))]


def repeat(ranks: Ranks, random: Random) -> None:
    rank = random.choice(ranks)
    rank.insert(random.randrange(len(rank)), random.choice(rank))


def move(ranks: Ranks, random: Random) -> None:
    source, target = random.choice(ranks), random.choice(ranks)
    target.insert(random.randrange(len(target) + 1), source.pop(random.randrange(len(source))))


def reletter(ranks: Ranks, random: Random) -> None:
    rank = random.choice(ranks)
    at = random.randrange(len(rank))
    rank[at] = rank[at]._replace(letter=random.choice("FIWB"))


def renumber(ranks: Ranks, random: Random) -> None:
    rank = random.choice(ranks)
    at = random.randrange(len(rank))
    rank[at] = rank[at]._replace(microbatch=rank[at].microbatch + random.choice((-1, 1)))


MUTATIONS: list[Callable[[Ranks, Random], None]] = [swap, drop, repeat, move, reletter, renumber]


def executable(problem: Problem, ranks: Ranks) -> bool:
    """The rules in their simplest form."""
    letters: dict[tuple[int, int], list[str]] = {}
    for rank, actions in enumerate(ranks):
        for stage, letter, j in actions:
            if stage not in problem.placement.stages_of[rank]:
                return False
            letters.setdefault((stage, j), []).append(letter)
    wanted = {(s, j) for s in range(problem.n_stages) for j in range(problem.microbatches)}
    if set(letters) != wanted or any(
        sorted(have) not in (["B", "F"], ["F", "I", "W"]) for have in letters.values()
    ):
        return False
    orders = Orders.from_actions(ranks)
    try:
        simulate(problem, orders)
    except Impossible:
        return False
    limits = problem.memory.limit
    return limits is None or all(
        peak <= limit + 1e-9 for peak, limit in zip(peak_memory(problem, orders), limits, strict=True)
    )


@given(
    problems(max_p=3, max_m=3),
    st.sampled_from([None, 0.0, 4.0]),
    st.lists(st.sampled_from(MUTATIONS), min_size=1, max_size=3),
    st.integers(0, 2**32),
)
def test_the_verifier_agrees_with_the_plain_rules_on_mutated_orders(
    problem: Problem,
    headroom: float | None,
    mutations: list[Callable[[Ranks, Random], None]],
    seed: int,
) -> None:
    if headroom is not None:
        problem = limited(problem, headroom)
    attempt = next(priority_schedules(problem, (1.0,)), None)
    if attempt is None:
        return
    random = Random(seed)
    ranks: Ranks = [attempt.orders.actions(rank) for rank in range(problem.pp_degree)]
    for mutate in mutations:
        if all(ranks):
            mutate(ranks, random)
    if any(action.microbatch < 0 for rank in ranks for action in rank):
        return  # no such text exists
    orders = Orders.from_actions(ranks)
    if executable(problem, ranks):
        verify_orders(problem, orders)
    else:
        with pytest.raises(InvalidPlan):
            verify_orders(problem, orders)


@pytest.mark.parametrize(
    ("rank", "actions", "says"),
    [
        (0, ["0F0", "3F0", "3I0", "0B0"], "stage 3 microbatch 0 has 1 F, 1 I, 0 W, 0 B"),
        (0, ["0F0", "3F0", "3I0", "3W0", "3W0", "0B0"], "2 W"),
        (0, ["0F0", "3F0", "3I0", "3W0", "0B0", "1F0"], "found 1F0 on rank 0"),
        (0, ["0F0", "3F0", "3W0", "3I0", "0B0"], "3W0 comes before 3I0"),
        (0, ["0F0", "3I0", "3F0", "3W0", "0B0"], "3I0 comes before 3F0"),
        (0, ["0F0", "3F0", "3I0", "3W0", "0B1"], "found 0B1; .* microbatches 0 to 0"),
        (0, ["0F0", "3F0", "3I0", "3W0", "4B0"], "found 4B0; stages are 0 to 3"),
        (0, ["3F0", "3I0", "3W0", "0B0"], "stage 0 microbatch 0 has 0 F, 0 I, 0 W, 1 B"),
        (0, ["0F0", "0F0", "3F0", "3I0", "3W0", "0B0"], "stage 0 microbatch 0 has 2 F"),
        (0, ["0F0", "3F0", "3I0", "3W0"], "stage 0 microbatch 0 has 1 F, 0 I, 0 W, 0 B"),
        (0, ["0F0", "3F0", "3W0", "0B0"], "stage 3 microbatch 0 has 1 F, 0 I, 1 W, 0 B"),
        (0, ["0F0", "3F0", "3I0", "3W0", "0B0", "0I0"], "stage 0 microbatch 0 has 1 F, 1 I, 0 W, 1 B"),
        (0, ["0F0", "3F0", "3I0", "3W0", "0B0", "0W0"], "stage 0 microbatch 0 has 1 F, 0 I, 1 W, 1 B"),
        (0, ["0B0", "0F0", "3F0", "3I0", "3W0"], "0B0 comes before 0F0"),
        (0, ["3F0", "0F0", "3I0", "3W0", "0B0"], "deadlocks.* among them 3F0"),
        (0, ["0F0", "3F0", "0B0", "3I0", "3W0"], "deadlocks.* among them 0B0"),
        (1, ["2F0", "1F0", "2I0", "1I0", "1W0", "2W0"], "deadlocks"),
        (1, ["1F0", "2F0", "1I0", "2I0", "1W0", "2W0"], "deadlocks"),
    ],
)
def test_broken_rules_are_reported(rank: int, actions: list[str], says: str) -> None:
    ranks = [list(GOOD[0]), list(GOOD[1])]
    verify_orders(uniform(2, 1), Orders.from_text(ranks))
    ranks[rank] = actions
    with pytest.raises(InvalidPlan, match=says):
        verify_orders(uniform(2, 1), Orders.from_text(ranks))


@pytest.mark.parametrize(
    ("action", "says"),
    [
        ((-1, 0, 0), "found -1F0; stages are 0 to 3"),
        ((0, 0, -1), "found 0F-1; .* microbatches 0 to 0"),
        ((0, 4, 0), r"found 0\(letter 4\)0"),
        ((0, -1, 0), r"found 0\(letter -1\)0"),
    ],
)
def test_numbers_that_have_no_text_are_reported(action: tuple[int, int, int], says: str) -> None:
    good = Orders.from_text(GOOD)
    rows = [
        [(a.stage, "FIWB".index(a.letter), a.microbatch) for a in good.actions(rank)] for rank in range(2)
    ]
    rows[0][0] = action
    with pytest.raises(InvalidPlan, match=says):
        verify_orders(uniform(2, 1), Orders.pack(rows))


@pytest.mark.parametrize("offset", [[0, 5, 10], [1, 5, 11], [0, 12, 11], [0, 11]])
def test_lists_that_overlap_or_miss_actions_are_refused(offset: list[int]) -> None:
    with pytest.raises(InvalidPlan, match=r"lists overlap or miss actions|found 1 ranks"):
        verify_orders(uniform(2, 1), replace(Orders.from_text(GOOD), offset=np.array(offset)))


def test_memory_counts_while_an_action_runs_and_between_actions() -> None:
    """Rank 0 holds most after F, rank 1 after an I that allocates; both are exactly at their limits."""
    problem = uniform(2, 1)
    memory = replace(
        problem.memory,
        backward_input=(-0.5, 0.25, 0.25, -0.5),
        backward_weight=(-0.5, -1.25, -1.25, -0.5),
        static=(3.0, 5.0),
    )
    for limit, fits in (((5.0, 7.5), True), ((4.9, 7.5), False), ((5.0, 7.4), False)):
        limited_problem = replace(problem, memory=replace(memory, limit=limit))
        if fits:
            verify_orders(limited_problem, Orders.from_text(GOOD))
        else:
            with pytest.raises(InvalidPlan, match=r"rank \d needs [57]\.?5? of memory; its limit is [47]\."):
                verify_orders(limited_problem, Orders.from_text(GOOD))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return search(uniform(3, 5, limit=5, p2p=1), SearchOptions(effort="quick"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: {"makespan": 1.001 * m.makespan}, "makespan"),
        (lambda m: {"span": 1.001 * m.span}, "span .* too large"),
        (lambda m: {"span": 0.999 * m.span}, "span .* too small"),
        (lambda m: {"lower_bound": 2 * m.lower_bound}, "lower_bound .* is no bound"),
        (lambda m: {"gap": 1.5 * (m.gap or 0.1)}, "gap"),
        (lambda m: {"bubble_rate": 1.01 * m.bubble_rate}, "bubble_rate"),
        (lambda m: {"peak_memory": tuple(1.01 * peak for peak in m.peak_memory)}, "peak_memory of rank 0"),
        (lambda m: {"peak_memory": m.peak_memory[:2]}, "peak_memory states 2 ranks, not 3"),
        (lambda m: {"lower_bound": m.span / 2, "gap": 1.0, "status": "optimal"}, "means a gap of 0"),
    ],
)
def test_false_metrics_are_refused(plan: Plan, change: Callable[[Metrics], Any], says: str) -> None:
    verify(plan)
    with pytest.raises(InvalidPlan, match=says):
        verify(replace(plan, metrics=replace(plan.metrics, **change(plan.metrics))))


@pytest.mark.parametrize("name", ["makespan", "span", "bubble_rate", "peak_memory", "lower_bound", "gap"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_metrics_that_are_not_finite_are_refused(plan: Plan, name: str, value: float) -> None:
    if name == "lower_bound" and value == -1:
        return  # true, if of no use
    false: Any = (value,) * 3 if name == "peak_memory" else value
    with pytest.raises(InvalidPlan, match=name):
        verify(replace(plan, metrics=replace(plan.metrics, **{name: false})))


@given(problems(max_p=5, max_m=5, kinds=("v", "loop", "single")), st.integers(0, 2**32))
def test_only_the_true_span_passes(problem: Problem, seed: int) -> None:
    orders = random_orders(problem, Random(seed))
    made = make_plan(problem, orders, method="random", lower_bound=0.0)  # verifies
    true = largest_cycle_mean(reach(problem, orders))
    assert made.metrics.span == pytest.approx(true, rel=1e-12)
    busy = (1 - made.metrics.bubble_rate) * made.metrics.span if true > 0 else 0.0
    for factor, says in (
        (1 - 1e-6, "too small"),
        (1 + 1e-6, "too large"),
        (0.5, "too small"),
        (2.0, "too large"),
    ):
        span = true * factor
        false = replace(made.metrics, span=span, bubble_rate=1 - busy / span if span > 0 else 0.0)
        if true > 0:
            with pytest.raises(InvalidPlan, match=f"the stated span .* is {says}"):
                verify(replace(made, metrics=false))


def test_a_span_is_refuted_by_a_cycle_and_confirmed_by_start_times() -> None:
    """Two ranks, each feeding the other's last action: the only critical cycle visits both."""
    for mean, length in ((5.0, {(0, 1): 6.0, (1, 0): 4.0}), (8.0, {(0, 0): 8.0, (0, 1): 1.0})):
        graph = graph_of_paths(length)
        release = np.zeros(2)
        assert refuting_cycle(graph, mean + 0.01, release) is None
        assert np.all(ends(graph, release) <= release + mean + 0.01 + 1e-9)
        assert refuting_cycle(graph, mean - 0.01, release) == mean


def test_start_times_before_an_input_are_refused() -> None:
    graph = graph_of_paths({(0, 0): 5.0, (0, 1): 6.0})
    start = earliest(graph, np.zeros(2))
    assert start.tolist() == [0, 0, 5, 0, 0, 6]
    assert respects_inputs(graph, start)
    for at in (2, 5):  # after its own rank, and after the other's
        early = start.copy()
        early[at] -= 0.5
        assert not respects_inputs(graph, early)


def graph_of_paths(length: dict[tuple[int, int], float]) -> PrecedenceGraph:
    """Two ranks of three actions each: the first feeds the other rank's last; all take no time."""
    own = [length.get((rank, rank), 0.0) for rank in range(2)]
    return PrecedenceGraph(
        previous=np.array([-1, 0, 1, -2, 3, 4], dtype=np.int32),
        feed=np.array([-1, -1, 3, -1, -1, 0], dtype=np.int32),
        latency=np.array([0, 0, length.get((1, 0), 0.0), 0, 0, length.get((0, 1), 0.0)]),
        duration=np.array([0, own[0], 0, 0, own[1], 0.0]),
        sequence=np.array([0, 1, 3, 4, 2, 5], dtype=np.int32),
        first=np.array([0, 3]),
        last=np.array([2, 5]),
    )


def ends(graph: PrecedenceGraph, release: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray((earliest(graph, release) + graph.duration)[graph.last])


def test_plans_are_verified_without_numba(plan: Plan) -> None:
    """GPU nodes verify plan files, and have no Numba."""
    code = """
import json, sys
sys.modules["numba"] = None
from support.problems import uniform
from zbv_solver.errors import InvalidPlan
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.reading import parse_plan
from zbv_solver.verify.verifier import verify, verify_orders
document, good = json.load(sys.stdin)
verify(parse_plan(document))
document["metrics"]["span"] *= 1.01
verify_orders(uniform(2, 1), Orders.from_text(good))
good[0][0], good[0][1] = good[0][1], good[0][0]
for check in (
    lambda: verify(parse_plan(document)),
    lambda: verify_orders(uniform(2, 1), Orders.from_text(good)),
):
    try: check()
    except InvalidPlan as error: print(error)
"""
    made = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        input=json.dumps([plan_json(plan), GOOD]),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
    )
    assert "too large" in made.stdout
    assert "deadlocks" in made.stdout
