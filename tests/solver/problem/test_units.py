"""A plan does not depend on the units of time and memory, and no accepted number breaks the search."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cuts import layered, layered_in_other_units, layered_problems
from support.problems import decades, differing_problems, in_other_units, rough_problems, uniform
from zbv_solver.errors import InfeasibleMemory
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.layered_problem import AnyProblem, LayeredProblem
from zbv_solver.problem.numeric import OPTIMAL_GAP
from zbv_solver.search.options import Budget, SearchOptions
from zbv_solver.search.run import search
from zbv_solver.verify.verifier import verify

BRIEF = Budget(2_000, 0.75, 4_000, 60, 4_000, 60, 20_000, 400, 80, 0.015, 60, 0.02)
"""All phases of a search, each with a tiny budget."""
HEURISTIC = Budget(20_000, 0.75, 40_000, 100, 40_000, 100, 200_000, 2_000, 0, 0.015, 0, 0.02)
"""No CP-SAT, which would find the best order of a small problem from any start."""
LINK = {"latency": 0.5, "bandwidth": 2}


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BUDGETS", "DIFFERING"):
        monkeypatch.setattr(f"zbv_solver.search.options.{name}", {"standard": HEURISTIC, "quick": BRIEF})


def outcome(problem: AnyProblem) -> Plan | None:
    """The verified plan; None if none fits the memory."""
    try:
        plan = search(problem, SearchOptions("quick"))
    except InfeasibleMemory:
        return None
    verify(plan)
    return plan


def scaled(problem: AnyProblem, time: float, memory: float) -> AnyProblem:
    change = layered_in_other_units if isinstance(problem, LayeredProblem) else in_other_units
    return change(problem, time, memory)  # type: ignore[arg-type]


powers = st.integers(-20, 20).map(lambda exponent: 2.0**exponent)
any_problems = st.one_of(
    rough_problems(), differing_problems(), layered_problems(placements=("v", "loop", "single", "auto"))
)


@settings(max_examples=settings().max_examples // 4)
@given(any_problems, powers, powers, decades(), decades())
def test_a_plan_does_not_depend_on_the_units_of_its_problem(
    problem: AnyProblem, time: float, memory: float, any_time: float, any_memory: float
) -> None:
    """A power of two changes no digit of a float; other factors change results by rounding."""
    plan, same = outcome(problem), outcome(scaled(problem, time, memory))
    other = outcome(scaled(problem, any_time, any_memory))
    if plan is None or same is None or other is None:
        assert plan is same is other
        return
    assert same.orders == plan.orders
    assert same.objective == plan.objective * time
    assert same.metrics.lower_bound == plan.metrics.lower_bound * time
    assert other.objective == pytest.approx(plan.objective * any_time, rel=OPTIMAL_GAP, abs=0)
    assert same.metrics.status == other.metrics.status == plan.metrics.status
    if (model := plan.problem.model) is not None and plan.cut is not None:
        assert same.problem.model is not None and same.cut is not None  # noqa: PT018
        assert same.problem.model.cut == model.cut
        assert same.cut.lower_bound == plan.cut.lower_bound * time


@pytest.mark.parametrize("factor", [0.1, 1 / 3, 3e-10, 7e9])
@pytest.mark.parametrize(("p", "m", "limit"), [(3, 12, 4.5), (4, 9, 6.0)])
def test_moves_that_tie_in_one_unit_tie_in_every_unit(p: int, m: int, limit: float, factor: float) -> None:
    """In floats, 0.1 + 0.2 exceeds 0.3. Annealing must not take another path because of that."""
    problem = uniform(p, m, p2p=2, limit=limit)
    assert search(in_other_units(problem, factor, factor)).orders == search(problem).orders


def test_cuts_that_tie_in_one_unit_tie_in_every_unit() -> None:
    draw, keys = random.Random(0), ("forward", "backward_input", "backward_weight", "output_bytes")
    layers = [{"name": f"layer{at}"} | {key: draw.randint(1, 6) for key in keys} for at in range(12)]
    problem = layered(layers=layers, pp_degree=3, placement="loop", costs={"link": LINK})
    plan, other = (search(each, SearchOptions("quick")) for each in (problem, scaled(problem, 0.1, 1.0)))
    assert other.orders == plan.orders
    assert other.objective == pytest.approx(plan.objective * 0.1, rel=OPTIMAL_GAP, abs=0)


@pytest.mark.parametrize(("cost", "amount"), [(1e-10, 2e12), (1e-90, 2e-10), (1e10, 2)])
def test_problems_with_tiny_and_huge_numbers_are_solved_to_optimality(cost: float, amount: float) -> None:
    problem = uniform(2, 3, p2p=1, limit=2.5)
    plan = search(in_other_units(problem, cost, amount), SearchOptions("quick"))
    assert plan.metrics.status == "optimal"
    assert plan.objective / cost == pytest.approx(search(problem).objective)
