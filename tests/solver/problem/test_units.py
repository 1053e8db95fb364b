"""A plan does not depend on the units of time and memory, and no accepted number breaks the search."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cuts import layered, layered_in_other_units, layered_problems
from support.problems import decades, in_other_units, rough_problems, uniform
from zbv_solver.errors import InfeasibleMemory
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.numeric import OPTIMAL_GAP
from zbv_solver.problem.problem import Problem
from zbv_solver.search.options import Budget, SearchOptions
from zbv_solver.search.run import search
from zbv_solver.verify.verifier import verify

FEWER = settings(max_examples=settings().max_examples // 6)
BRIEF = Budget(2_000, 0.75, 4_000, 60, 4_000, 60, 20_000, 400, 80, 0.015, 60, 0.02)
"""All phases of a search, each with a tiny budget."""


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BUDGETS", "DIFFERING"):
        monkeypatch.setattr(f"zbv_solver.search.options.{name}", {"standard": BRIEF, "quick": BRIEF})


powers = st.integers(-20, 20).map(lambda exponent: 2.0**exponent)


@FEWER
@given(rough_problems(), powers, powers, decades(), decades())
def test_the_plan_of_a_problem_does_not_depend_on_its_units(
    problem: Problem, time: float, memory: float, any_time: float, any_memory: float
) -> None:
    """A power of two changes no digit of a float; other factors change results by rounding."""
    plan = search(problem)
    verify(plan)
    assert plan.metrics.lower_bound <= plan.objective
    same = search(in_other_units(problem, time, memory))
    assert same.orders == plan.orders
    assert same.objective == plan.objective * time
    assert same.metrics.lower_bound == plan.metrics.lower_bound * time
    assert same.metrics.status == plan.metrics.status
    other = search(in_other_units(problem, any_time, any_memory))
    assert other.objective == pytest.approx(plan.objective * any_time, rel=OPTIMAL_GAP, abs=0)
    assert other.metrics.status == plan.metrics.status


def outcome(problem: LayeredProblem) -> Plan | None:
    """The plan; None if none fits the memory."""
    try:
        return search(problem, SearchOptions("quick"))
    except InfeasibleMemory:
        return None


@FEWER
@given(layered_problems(placements=("v", "loop", "single", "auto")), powers, powers, decades(), decades())
def test_the_plan_of_layers_does_not_depend_on_their_units(
    problem: LayeredProblem, time: float, memory: float, any_time: float, any_memory: float
) -> None:
    plan = outcome(problem)
    same = outcome(layered_in_other_units(problem, time, memory))
    other = outcome(layered_in_other_units(problem, any_time, any_memory))
    if plan is None or same is None or other is None:
        assert plan is same is other
        return
    assert same.orders == plan.orders
    assert same.problem.model is not None
    assert plan.problem.model is not None
    assert same.problem.model.cut == plan.problem.model.cut
    assert same.objective == plan.objective * time
    assert same.cut is not None
    assert plan.cut is not None
    assert same.cut.lower_bound == plan.cut.lower_bound * time
    assert other.objective == pytest.approx(plan.objective * any_time, rel=OPTIMAL_GAP, abs=0)


HEURISTIC = Budget(20_000, 0.75, 40_000, 100, 40_000, 100, 200_000, 2_000, 0, 0.015, 0, 0.02)
"""No CP-SAT, which would find the best order of a small problem from any start."""


@pytest.mark.parametrize("factor", [0.1, 1 / 3, 3e-10, 7e9])
@pytest.mark.parametrize(("p", "m", "limit"), [(3, 7, 3.0), (3, 12, 4.5), (4, 9, 6.0)])
def test_moves_that_tie_in_one_unit_tie_in_every_unit(
    p: int, m: int, limit: float, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In floats, 0.1 + 0.2 exceeds 0.3. Annealing must not take another path because of that."""
    monkeypatch.setattr("zbv_solver.search.options.BUDGETS", {"standard": HEURISTIC})
    problem = uniform(p, m, p2p=2, limit=limit)
    other = search(in_other_units(problem, factor, factor))
    assert other.orders == search(problem).orders


@pytest.mark.parametrize("factor", [0.1, 1 / 3])
def test_cuts_that_tie_in_one_unit_tie_in_every_unit(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zbv_solver.search.options.BUDGETS", {"quick": HEURISTIC})
    found = []
    for seed in range(2):
        draw = random.Random(seed)
        layers = [
            {
                "name": f"layer{number}",
                "forward": draw.randint(1, 6),
                "backward_input": draw.randint(1, 6),
                "backward_weight": draw.randint(0, 4),
                "output_bytes": draw.randint(0, 9),
            }
            for number in range(16)
        ]
        link = {"latency": 0.5, "bandwidth": 2}
        problem = layered(layers=layers, pp_degree=3, placement="loop", costs={"link": link})
        plan, other = outcome(problem), outcome(layered_in_other_units(problem, factor, 1.0))
        assert plan is not None
        assert other is not None
        found.append(other.orders == plan.orders)
        assert other.objective == pytest.approx(plan.objective * factor, rel=OPTIMAL_GAP, abs=0)
    assert all(found)
