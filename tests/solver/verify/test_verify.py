"""The verifier accepts exactly the orders that a plain reference can execute."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from math import inf, nan
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.orders import random_orders
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
from zbv_solver.verify.verifier import verify, verify_orders

Ranks = list[list[Action]]
GOOD = [
    ["0F0", "3F0", "3I0", "3W0", "0B0"],
    ["1F0", "2F0", "2I0", "1I0", "1W0", "2W0"],
]


def mutate(ranks: Ranks, random: Random) -> None:
    """Move, repeat, drop or change an action."""
    source, target = random.choice(ranks), random.choice(ranks)
    at = random.randrange(len(source))
    action = source[at] if random.random() < 0.2 else source.pop(at)
    if random.random() < 0.2:
        action = action._replace(letter=random.choice("FIWB"))
    if random.random() < 0.2:
        action = action._replace(microbatch=action.microbatch + random.choice((-1, 1)))
    if random.random() < 0.8:
        target.insert(random.randrange(len(target) + 1), action)


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
    problems(max_p=3, max_m=3), st.sampled_from([None, 0.0, 4.0]), st.integers(1, 3), st.integers(0, 2**32)
)
def test_the_verifier_agrees_with_the_plain_rules_on_mutated_orders(
    problem: Problem, headroom: float | None, mutations: int, seed: int
) -> None:
    if headroom is not None:
        problem = limited(problem, headroom)
    attempt = next(priority_schedules(problem, (1.0,)), None)
    if attempt is None:
        return
    random = Random(seed)
    ranks: Ranks = [attempt.orders.actions(rank) for rank in range(problem.pp_degree)]
    for _ in range(mutations):
        if all(ranks):
            mutate(ranks, random)
    orders = Orders.from_actions(ranks)
    if executable(problem, ranks):
        verify_orders(problem, orders)
    else:
        with pytest.raises(InvalidPlan):
            verify_orders(problem, orders)


def listed(text: str) -> Orders:
    """A good order, but for the list of rank 0."""
    return Orders.from_text([text.split(), GOOD[1]])


def divided(*offset: int) -> Orders:
    return replace(Orders.from_text(GOOD), offset=np.array(offset))


@pytest.mark.parametrize(
    ("orders", "says"),
    [
        (listed("0F0 3F0 3I0 0B0"), "stage 3 microbatch 0 has 1 F, 1 I, 0 W, 0 B; it must have one F"),
        (listed("0F0 0F0 3F0 3I0 3W0 0B0"), "stage 0 microbatch 0 has 2 F"),
        (listed("0F0 3F0 3I0 3W0 0B0 1F0"), "found 1F0 on rank 0; placement v puts stage 1 on rank 1"),
        (listed("0F0 3F0 3W0 3I0 0B0"), "3W0 comes before 3I0"),
        (listed("0B0 0F0 3F0 3I0 3W0"), "0B0 comes before 0F0"),
        (listed("0F0 3F0 3I0 3W0 0B1"), "found 0B1; .* microbatches 0 to 0"),
        (listed("0F0 3F0 3I0 3W0 4B0"), "found 4B0; stages are 0 to 3"),
        (listed("3F0 0F0 3I0 3W0 0B0"), "deadlocks: 11 actions .* among them 3F0"),
        (Orders.pack([[(-1, 0, 0)], []]), "found -1F0; stages are 0 to 3"),
        (Orders.pack([[(0, 0, -1)], []]), "found 0F-1; .* microbatches 0 to 0"),
        (Orders.pack([[(0, 4, 0)], []]), r"found 0\(letter 4\)0"),
        (Orders.pack([[(0, -1, 0)], []]), r"found 0\(letter -1\)0"),
        (divided(0, 5, 10), "lists overlap or miss actions"),
        (divided(0, 12, 11), "lists overlap or miss actions"),
        (divided(0, 11), "found 1 ranks; the problem has 2"),
    ],
)
def test_broken_rules_are_reported(orders: Orders, says: str) -> None:
    verify_orders(uniform(2, 1), Orders.from_text(GOOD))
    with pytest.raises(InvalidPlan, match=says):
        verify_orders(uniform(2, 1), orders)


def test_the_memory_that_a_rank_needs_is_reported() -> None:
    with pytest.raises(InvalidPlan, match=r"rank 0 needs 2 of memory; its limit is 1\.9"):
        verify_orders(uniform(2, 1, limit=1.9), Orders.from_text(GOOD))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return search(uniform(3, 5, limit=5, p2p=1), SearchOptions(effort="quick"))


NOT_FINITE: list[tuple[str, Any]] = [
    *((name, value) for name in ("makespan", "span", "bubble_rate", "lower_bound") for value in (nan, inf)),
    *(("peak_memory", (value,) * 3) for value in (nan, inf)),
    ("gap", nan),
]


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
        *(
            (lambda _, name=name, value=value: {name: value}, f"{name} .* must be a finite")
            for name, value in NOT_FINITE
        ),
    ],
)
def test_false_metrics_are_refused(plan: Plan, change: Callable[[Metrics], Any], says: str) -> None:
    verify(plan)
    with pytest.raises(InvalidPlan, match=says):
        verify(replace(plan, metrics=replace(plan.metrics, **change(plan.metrics))))


@given(problems(max_p=5, max_m=5, kinds=("v", "loop", "single")), st.integers(0, 2**32))
def test_only_the_true_span_passes(problem: Problem, seed: int) -> None:
    orders = random_orders(problem, Random(seed))
    made = make_plan(problem, orders, method="random", lower_bound=0.0)  # verifies
    true = largest_cycle_mean(reach(problem, orders))
    assert made.metrics.span == pytest.approx(true, rel=1e-12)
    busy = (1 - made.metrics.bubble_rate) * made.metrics.span
    for factor in (0.5, 1 - 1e-6, 1 + 1e-6, 2.0) if true > 0 else ():
        metrics = replace(made.metrics, span=true * factor, bubble_rate=1 - busy / (true * factor))
        says = "small" if factor < 1 else "large"
        with pytest.raises(InvalidPlan, match=f"the stated span .* is too {says}"):
            verify(replace(made, metrics=metrics))


def test_plans_are_verified_without_numba(plan: Plan) -> None:
    """GPU nodes verify plan files, and have no Numba. Nor is it imported before a plan is verified."""
    code = """
import json, sys
from zbv_solver.errors import InvalidPlan
from zbv_solver.plans.reading import parse_plan
from zbv_solver.verify.verifier import verify
print(sys.modules.get("numba"))
sys.modules["numba"] = None
for document in json.load(sys.stdin):
    try: print(verify(parse_plan(document)))
    except InvalidPlan as error: print(error)
"""
    good = plan_json(plan) | {"plan_id": None}
    false = good | {"metrics": good["metrics"] | {"span": 2 * plan.metrics.span}}
    stuck = good | {"ranks": [good["ranks"][0][::-1], *good["ranks"][1:]]}
    made = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        input=json.dumps([good, false, stuck]),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    before, fine, span, order = made.stdout.splitlines()
    assert (before, fine) == ("None", "None")
    assert "too large" in span
    assert "depends on it" in order
