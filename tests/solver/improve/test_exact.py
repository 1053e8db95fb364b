"""CP-SAT proves small cases, agrees with exhaustive search, is deterministic, and can be stopped."""

from __future__ import annotations

import math
import random
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from ortools.sat.python import cp_model
from support.plain_model import optimum
from support.problems import limited, limited_problems, problems, uniform, with_sizes
from support.reference import all_orders_of_one_microbatch
from zbv_solver.construct.dispatch import priority_schedules, serial
from zbv_solver.errors import InfeasibleMemory
from zbv_solver.improve.cp_model import CpModel
from zbv_solver.improve.cp_sat import Amounts, make_grid, make_solver
from zbv_solver.improve.cp_search import CpSearch, Listener, refine
from zbv_solver.improve.cp_window import FreeWindow, Paths
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import LETTERS, F, Problem, W
from zbv_solver.problem.reading import parse_problem
from zbv_solver.problem.stages import Costs
from zbv_solver.search.unit import in_search_unit
from zbv_solver.timing.start_times import evaluate
from zbv_solver.verify.verifier import verify_orders

from benchmarks.soak.draw import NUMBERS, differing_stages, number_source
from benchmarks.soak.optimum import optimum as soaked
from benchmarks.soak.pipeline import read

TIGHT: dict[str, object] = {
    "pp_degree": 3,
    "microbatches": 8,
    "objective": "makespan",
    "costs": {
        "forward": [23, 22, 19, 19, 22, 24],
        "backward_input": [21, 22, 24, 23, 22, 26],
        "backward_weight": 16,
        "p2p": 1,
    },
    "memory": {
        "forward": [2, 3, 2, 3, 2, 3],
        "backward_input": [-1, -2, -1, -1, -1, -1],
        "backward_weight": [-1, -1, -1, -2, -1, -2],
        "limit": 9,
    },
}
"""A rank's W's take equally long and release different amounts, so the model orders them."""
TIGHT_OPTIMUM = 1271.0
KINDS = ("v", "loop", "single")


def value_of(problem: Problem, orders: object) -> float:
    timing = evaluate(problem, orders)  # type: ignore[arg-type]  # Orders
    return timing.span if problem.objective == "span" else timing.makespan


@given(problems(max_p=3, max_m=1))
@settings(max_examples=25)
def test_proves_the_optimum_of_exhaustive_search(problem: Problem) -> None:
    best = min(value_of(problem, orders) for orders in all_orders_of_one_microbatch(problem))
    start = serial(problem).orders
    result = refine(problem, start, lower_bound=0.0, effort=5.0)
    assert result.proved
    assert value_of(problem, result.orders or start) == pytest.approx(best)
    assert result.lower_bound == pytest.approx(best)


def assert_proves_plain_optimum(problem: Problem) -> None:
    start = serial(problem).orders
    result = refine(problem, start, lower_bound=0.0, effort=5.0)
    found = value_of(problem, result.orders or start)
    assert result.proved
    assert result.lower_bound == pytest.approx(found)
    try:
        assert optimum(problem, value_of(problem, start), effort=0.05) == pytest.approx(found)
    except RuntimeError:
        event("the plain model was too slow")


@given(limited_problems(max_p=2, max_m=3, kinds=KINDS) | limited_problems(max_p=3, max_m=2, kinds=KINDS))
@settings(max_examples=25)
def test_proves_the_optimum_of_a_plain_model(problem: Problem) -> None:
    assert_proves_plain_optimum(problem)


@given(limited_problems(max_p=2, max_m=3), st.lists(st.integers(0, 3), min_size=3, max_size=3))
@settings(max_examples=12)
def test_proves_the_optimum_of_a_plain_model_where_stages_are_alike(
    problem: Problem, costs: list[int]
) -> None:
    """If the W's of a rank take equally long, the model orders them by what they release."""
    n = problem.n_stages
    forward, inputs, weights = ((float(cost),) * n for cost in costs)
    assert_proves_plain_optimum(
        replace(
            problem,
            costs=replace(
                problem.costs, forward=forward, backward_input=inputs, backward_weight=weights, backward=None
            ),
        )
    )


@pytest.mark.parametrize("number", range(10))
def test_proves_the_optimum_over_all_orders_of_microbatches_that_differ(number: int) -> None:
    """The independent model of the soak test proves it, too; its stages run microbatches in any order."""
    chance = random.Random(f"cores/{number}")
    document = differing_stages(chance, number_source(chance, NUMBERS[number % len(NUMBERS)]))
    pipeline = read(document)
    if not pipeline.is_feasible():
        with pytest.raises(InfeasibleMemory):
            parse_problem(document).require_feasible()
        return
    best, (problem, unit) = soaked(pipeline, effort=0.05), in_search_unit(parse_problem(document))
    start = serial(problem).orders
    result = refine(problem, start, lower_bound=0.0, effort=0.1)
    found = value_of(problem, result.orders or start) * unit
    assert result.lower_bound * unit <= float(best.value) * (1 + 1e-9)
    if best.is_exact and result.proved:
        assert found == pytest.approx(float(best.value), rel=1e-8)


def test_equal_microbatches_among_others_ascend_where_cp_sat_searches() -> None:
    problem = with_sizes(uniform(2, 4, limit=7.0), [0.0, 2.0, 0.0, 2.0])
    swapped = serial(problem).orders.renamed(np.array([2, 3, 0, 1]))
    result = refine(problem, swapped, lower_bound=0.0, effort=1.0)
    assert result.proved
    assert result.orders is not None
    for stage, letter in product(range(problem.n_stages), (F, W)):
        ran = result.orders.microbatch[(result.orders.stage == stage) & (result.orders.letter == letter)]
        assert [j for j in ran if j % 2 == 0] == [0, 2]
        assert [j for j in ran if j % 2] == [1, 3]


def test_proves_a_larger_problem_with_tight_memory_optimal() -> None:
    """Wrong implications of memory or a wrong dominance rule may do no harm in tiny problems."""
    problem = parse_problem(TIGHT)
    start = min((a.orders for a in priority_schedules(problem)), key=lambda o: value_of(problem, o))
    result = refine(problem, start, lower_bound=0.0, effort=5.0)
    assert result.proved
    assert value_of(problem, result.orders) == pytest.approx(TIGHT_OPTIMUM)


def has_solution(problem: Problem, actions: list[str]) -> bool:
    """Whether the model admits exactly this order of a single rank."""
    grid, start = make_grid(problem), serial(problem).orders
    amounts = None if problem.memory.limit is None else [Amounts.of(problem, 0)]
    window = FreeWindow.whole(Paths.of(grid, start), start, 0)
    model = CpModel(problem, grid, amounts, window, 1000, minimise=False)
    order = [(LETTERS.index(letter), stage, j) for stage, letter, j in Orders.from_text([actions]).actions(0)]
    for first, second in pairwise(order):
        model.model.add(model.end(first) <= model.start(second))
    status = make_solver(1.0, None, 0).solve(model.model)
    assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.INFEASIBLE)
    return status != cp_model.INFEASIBLE


@pytest.mark.parametrize(
    ("released", "favoured"),
    [((1.0, 2.0), 1), ((2.0, 1.0), 0), ((1.0, 1.0), 0)],
)
def test_of_two_ready_equal_weights_the_one_that_releases_more_runs_first(
    released: tuple[float, float], favoured: int
) -> None:
    """Lemma 29; of equal amounts, the first stage's."""
    plain = uniform(1, 1)
    memory = replace(plain.memory, forward=(2.0, 2.0), backward_weight=tuple(-amount for amount in released))
    inputs = tuple(amount - 2.0 for amount in released)
    problem = replace(plain, memory=replace(memory, backward_input=inputs))
    begin, other = ["0F0", "1F0", "1I0"], 1 - favoured
    assert has_solution(problem, [*begin, "0I0", f"{favoured}W0", f"{other}W0"])
    assert not has_solution(problem, [*begin, "0I0", f"{other}W0", f"{favoured}W0"])
    assert has_solution(problem, [*begin, "1W0", "0I0", "0W0"])  # the other one is not ready yet


def test_weights_that_take_different_times_run_in_any_order() -> None:
    plain = uniform(1, 1)
    problem = replace(plain, costs=replace(plain.costs, backward_weight=(1.0, 2.0)))
    for first, second in ((0, 1), (1, 0)):
        assert has_solution(problem, ["0F0", "1F0", "1I0", "0I0", f"{first}W0", f"{second}W0"])


def test_weaker_bounds_of_the_solver_are_ignored() -> None:
    problem = uniform(2, 2)
    heard: list[float] = []
    search = CpSearch(problem, serial(problem).orders, listener=Listener(on_bound=heard.append))
    search.bound, search.lower = 5.0, search.grid.at_least(5.0)
    parts, most = search.lower, search.upper
    for weaker in (0.0, parts - 1.0, float(parts), -math.inf, math.inf):
        search._raise_bound(weaker, most)
        assert (search.bound, search.lower, heard) == (5.0, parts, [])
    search._raise_bound(2.0 * parts, most)
    assert search.bound == 10.0
    assert search.lower == 2 * parts
    search._raise_bound(1.5 * parts, most)
    assert search.bound == 10.0
    assert search.lower == 2 * parts
    assert heard == [10.0]


@given(limited_problems(max_p=3, max_m=4))
@settings(max_examples=10)
def test_reports_ever_better_orders_and_bounds(problem: Problem) -> None:
    start = serial(problem).orders
    values: list[float] = []
    bounds: list[float] = []
    orders: list[Orders] = []

    def on_solution(found: Orders, value: float) -> None:
        verify_orders(problem, found)
        orders.append(found)
        values.append(value)

    result = refine(
        problem, start, lower_bound=0.0, effort=0.3, listener=Listener(on_solution, bounds.append)
    )
    worst_first = [value_of(problem, start), *values]
    assert all(later < earlier for earlier, later in pairwise(worst_first))
    assert all(later > earlier for earlier, later in pairwise([0.0, *bounds]))
    assert result.orders is (orders[-1] if orders else None)
    assert result.lower_bound == (bounds[-1] if bounds else 0.0) <= worst_first[-1] * (1 + 1e-9)


@given(limited_problems(max_p=2, max_m=3))
@settings(max_examples=8)
def test_repeats_itself(problem: Problem) -> None:
    start = next(priority_schedules(problem)).orders
    results = [refine(problem, start, lower_bound=0.0, effort=0.2, seed=7) for _ in range(2)]
    assert results[0].orders == results[1].orders
    assert results[0].lower_bound == results[1].lower_bound


def test_python_handles_ctrl_c_during_a_search() -> None:
    """OR-Tools would replace Python's handler, and leave the system's default, which kills the process."""
    program = (
        "import os, signal\n"
        "from zbv_solver.improve.cp_sat import make_solver\n"
        "from ortools.sat.python import cp_model\n"
        "model = cp_model.CpModel()\n"
        "model.maximize(model.new_int_var(0, 9, 'x'))\n"
        "make_solver(1.0, None, 0).solve(model)\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    signal.pause()\n"
        "except KeyboardInterrupt:\n"
        "    print('orderly')\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.stdout == "orderly\n", ran.stderr


def test_fractional_costs_keep_a_valid_bound() -> None:
    """Thirds have no common unit: durations are rounded down, and so is the bound."""
    third = 1 / 3
    plain = uniform(2, 3)
    problem = replace(
        plain,
        costs=Costs((third,) * 4, (2 * third,) * 4, (third,) * 4, (third / 7,) * 3),
        objective="makespan",
    )
    start = serial(problem).orders
    result = refine(problem, start, lower_bound=0.0, effort=5.0)
    assert result.orders is not None
    found = value_of(problem, result.orders)
    assert result.lower_bound <= found < value_of(problem, start)
    assert result.lower_bound == pytest.approx(found, rel=1e-4)


def test_stops_soon_after_cancellation() -> None:
    problem = limited(uniform(4, 12, p2p=1), 3.0)
    start = serial(problem).orders
    asked = time.monotonic()
    result = refine(
        problem, start, lower_bound=0.0, effort=1e6, cancelled=lambda: time.monotonic() - asked > 0.1
    )
    assert not result.proved  # the effort would take months
    assert result.orders is None or value_of(problem, result.orders) <= value_of(problem, start)


def test_orders_that_differ_only_by_rounding_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs across eight orders of magnitude have no common unit: as integers, many orders look better."""
    problem = parse_problem(
        {
            "pp_degree": 3,
            "microbatches": 1,
            "placement": "single",
            "costs": {
                "forward": 23,
                "backward_input": 3,
                "backward_weight": [1.0577287820450975e-05, 359.2738615092226, 1],
                "backward": [2.1000074041014742, 253.59170305645583, 2.8],
            },
        }
    )
    asked: list[int] = []
    solve = CpSearch._solve

    def counted(search: CpSearch, most: int, effort: float, *, minimise: bool) -> object:
        asked.append(most)
        return solve(search, most, effort, minimise=minimise)

    monkeypatch.setattr(CpSearch, "_solve", counted)
    start = serial(problem).orders
    result = refine(problem, start, lower_bound=0.0, effort=0.02)
    best = value_of(problem, result.orders or start)
    assert best * (1 - 1e-4) < result.lower_bound <= best
    assert len(asked) < 60
