"""A plan does not depend on the units of time and memory, and no accepted number breaks the search."""

from __future__ import annotations

import random
from typing import Any

import pytest
import zbv_solver as zbv
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cuts import layered, layered_in_other_units, layered_problems
from support.problems import decades, differing_problems, in_other_units, rough_problems, uniform
from zbv_solver.plans.plan import plan_json
from zbv_solver.problem.numeric import OPTIMAL_GAP, ROUNDING
from zbv_solver.search.options import Budget
from zbv_solver.verify.verifier import verify

BRIEF = Budget(2_000, 0.75, 4_000, 60, 4_000, 60, 20_000, 400, 20_000, 80, 0.015, 60, 0.02)
"""All phases of a search, each with a tiny budget."""
HEURISTIC = Budget(20_000, 0.75, 40_000, 100, 40_000, 100, 200_000, 2_000, 200_000, 0, 0.015, 0, 0.02)
"""No CP-SAT, which would find the best order of a small problem from any start."""
LINK = {"latency": 0.5, "bandwidth": 2}


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BUDGETS", "DIFFERING"):
        monkeypatch.setattr(f"zbv_solver.search.options.{name}", {"standard": HEURISTIC, "quick": BRIEF})


def outcome(problem: Any, time: float = 1.0, memory: float = 1.0) -> Any:
    """The verified plan in these units; None if none fits the memory."""
    change = layered_in_other_units if isinstance(problem, zbv.LayeredProblem) else in_other_units
    try:
        plan = zbv.plan(change(problem, time, memory), "quick")
    except zbv.InfeasibleMemory:
        return None
    verify(plan)
    return plan


powers = st.integers(-20, 20).map(lambda exponent: 2.0**exponent)
any_problems = st.one_of(
    rough_problems(), differing_problems(), layered_problems(placements=("v", "loop", "single", "auto"))
)


@settings(max_examples=settings().max_examples // 4)
@given(any_problems, powers, powers, st.tuples(decades(1e-80), decades(1e-80)))
def test_a_plan_does_not_depend_on_the_units(problem: Any, time: float, memory: float, others: Any) -> None:
    """A power of two changes no digit of a float; other factors change results by rounding.

    Bounds that are nearly whole numbers become whole, which depends on the unit.
    """
    plan, same, other = outcome(problem), outcome(problem, time, memory), outcome(problem, *others)
    if plan is None or same is None or other is None:
        assert plan is same is other
        return
    assert same.orders == plan.orders
    assert same.objective == plan.objective * time
    assert same.metrics.lower_bound == pytest.approx(plan.metrics.lower_bound * time, rel=ROUNDING, abs=0)
    assert other.objective == pytest.approx(plan.objective * others[0], rel=OPTIMAL_GAP, abs=0)
    assert same.metrics.status == other.metrics.status == plan.metrics.status
    if plan.cut is not None:
        assert plan_json(same).get("partition") == plan_json(plan)["partition"]
        assert plan_json(same)["cut"]["lower_bound"] == plan.cut.lower_bound * time


@pytest.mark.parametrize("factor", [0.1, 1 / 3, 3e-10, 7e9])
@pytest.mark.parametrize(("p", "m", "limit"), [(3, 12, 4.5), (4, 9, 6.0)])
def test_moves_that_tie_in_one_unit_tie_in_every_unit(p: int, m: int, limit: float, factor: float) -> None:
    """In floats, 0.1 + 0.2 exceeds 0.3. Annealing must not take another path because of that."""
    problem = uniform(p, m, p2p=2, limit=limit)
    assert zbv.plan(in_other_units(problem, factor, factor)).orders == zbv.plan(problem).orders


def test_cuts_that_tie_in_one_unit_tie_in_every_unit() -> None:
    draw, keys = random.Random(0), ("forward", "backward_input", "backward_weight", "output_bytes")
    layers = [{"name": f"layer{at}"} | {key: draw.randint(1, 6) for key in keys} for at in range(12)]
    problem = layered(layers=layers, pp_degree=3, placement="loop", costs={"link": LINK})
    plan, other = outcome(problem), outcome(problem, 0.1)
    assert other.orders == plan.orders
    assert other.objective == pytest.approx(plan.objective * 0.1, rel=OPTIMAL_GAP, abs=0)
