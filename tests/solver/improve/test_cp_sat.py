"""CP-SAT proves optima, improves windows, reports true numbers, and can be stopped."""

from __future__ import annotations

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
from support.problems import differing_problems, limited, limited_problems, problems, uniform, with_sizes
from support.reference import all_orders_of_one_microbatch
from zbv_solver.construct.dispatch import priority_schedules, serial
from zbv_solver.errors import InfeasibleMemory
from zbv_solver.improve import cp_search
from zbv_solver.improve.annealing import anneal
from zbv_solver.improve.cp_model import CpModel
from zbv_solver.improve.cp_sat import Amounts, FreeWindow, Paths, make_grid, make_solver
from zbv_solver.improve.cp_search import CpSearch, ExactResult, Listener, refine, sweep_windows
from zbv_solver.plans.orders import Orders, first_in_first_out
from zbv_solver.problem.problem import LETTERS, F, Problem, W
from zbv_solver.problem.reading import parse_problem
from zbv_solver.problem.stages import Costs
from zbv_solver.search.assemble import in_search_unit
from zbv_solver.timing.start_times import earliest_times, objective_of, span_start_times
from zbv_solver.verify.verifier import verify_orders

from benchmarks.soak.draw import NUMBERS, differing_stages, number_source
from benchmarks.soak.optimum import optimum as soaked
from benchmarks.soak.pipeline import read


@given(problems(max_p=3, max_m=1))
@settings(max_examples=25)
def test_proves_the_optimum_of_exhaustive_search(problem: Problem) -> None:
    best = min(objective_of(problem, orders) for orders in all_orders_of_one_microbatch(problem))
    start = serial(problem).orders
    result = refine(problem, start, lower_bound=0.0, effort=5.0)
    assert result.proved
    assert objective_of(problem, result.orders or start) == pytest.approx(best)
    assert result.lower_bound == pytest.approx(best)


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
    found = objective_of(problem, result.orders or start) * unit
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


def has_solution(problem: Problem, actions: list[str]) -> bool:
    """Whether the model admits exactly this order of a single rank."""
    grid, start = make_grid(problem), serial(problem).orders
    amounts = None if problem.memory.limit is None else [Amounts.of(problem, 0)]
    window = FreeWindow.whole(Paths.of(grid, start), start, 0)
    model = CpModel(problem, grid, amounts, window, 1000, minimise=False)
    order = [(LETTERS.index(letter), stage, j) for stage, letter, j in Orders.from_text([actions]).actions(0)]
    for first, second in pairwise(order):
        model.model.add(model.end(first) <= model.start(second))
    status = make_solver(1.0, 0).solve(model.model)
    assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.INFEASIBLE)
    return status != cp_model.INFEASIBLE


def test_python_handles_ctrl_c_during_a_search() -> None:
    """OR-Tools would replace Python's handler, and leave the system's default, which kills the process."""
    program = (
        "import os, signal\n"
        "from zbv_solver.improve.cp_sat import make_solver\n"
        "from ortools.sat.python import cp_model\n"
        "model = cp_model.CpModel()\n"
        "model.maximize(model.new_int_var(0, 9, 'x'))\n"
        "make_solver(1.0, 0).solve(model)\n"
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
    found = objective_of(problem, result.orders)
    assert result.lower_bound <= found < objective_of(problem, start)
    assert result.lower_bound == pytest.approx(found, rel=1e-4)


def test_stops_soon_after_cancellation() -> None:
    problem = limited(uniform(4, 12, p2p=1), 3.0)
    start = serial(problem).orders
    asked = time.monotonic()
    result = refine(
        problem, start, lower_bound=0.0, effort=1e6, cancelled=lambda: time.monotonic() - asked > 0.1
    )
    assert not result.proved  # the effort would take months
    assert result.orders is None or objective_of(problem, result.orders) <= objective_of(problem, start)


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
    best = objective_of(problem, result.orders or start)
    assert best * (1 - 1e-4) < result.lower_bound <= best
    assert len(asked) < 60


@given(limited_problems(max_p=2, max_m=3, objective="makespan"))
@settings(max_examples=25)
def test_a_window_over_everything_reaches_the_optimum(problem: Problem) -> None:
    """It also chooses between B, and I and W."""
    start = next(priority_schedules(problem)).orders
    best = refine(problem, start, lower_bound=0.0, effort=5.0)
    search = CpSearch(problem, start)
    search.improve(0.0, float("inf"), effort=5.0)
    assert search.value == objective_of(problem, search.orders) == pytest.approx(best.lower_bound)


def test_a_window_changes_the_order_of_microbatches_that_differ() -> None:
    """Where memory is tight, the large microbatch had better enter last than between two small ones."""
    problem = with_sizes(uniform(2, 3, limit=12.0, objective="makespan"), [5.0, 0.0, 0.0])
    search = CpSearch(problem, serial(problem).orders)
    entered = []
    for _ in range(2):
        is_entry = (search.orders.stage == 0) & (search.orders.letter == F)
        entered.append(search.orders.microbatch[is_entry].tolist())
        search.improve(0.0, float("inf"), effort=1.0)
    assert entered == [[1, 0, 2], [1, 2, 0]]
    assert not search.improve(1e6, 2e6, effort=1.0)  # after the end of the order


def test_windows_improve_on_annealing_and_small_windows_on_large_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = limited(uniform(3, 16, p2p=1, objective="makespan"), 1.0)
    annealed = anneal(problem, serial(problem).orders, moves=3000, temperature=0.1, seed=0)
    found = sweep_windows(problem, annealed.orders, effort=0.1)
    assert found == sweep_windows(problem, annealed.orders, effort=0.1)
    monkeypatch.setattr(cp_search, "SIZES", cp_search.SIZES[:1])
    large = sweep_windows(problem, annealed.orders, effort=0.1)
    assert found is not None
    assert large is not None
    assert objective_of(problem, found) < objective_of(problem, large) < 0.9 * annealed.value


def test_windows_go_from_the_end_to_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = uniform(2, 8)
    orders = serial(problem).orders
    begins = []

    def improve(search: CpSearch, begin: float, end: float, effort: float) -> bool:
        begins.append((begin / search.value, (end - begin) / search.value, effort))
        return False

    monkeypatch.setattr(CpSearch, "improve", improve)
    monkeypatch.setattr(cp_search, "SIZES", (18,))
    # Eight windows of 18 actions, each twice as long as its distance from the next one.
    assert sweep_windows(problem, orders, effort=1.0) is None
    place, length, effort = (np.array(column) for column in zip(*begins, strict=True))
    assert place * 8 + 0.5 == pytest.approx([7, 6, 5, 4, 3, 2, 1, 0])
    assert length == pytest.approx(2 / 8)
    assert effort == pytest.approx(18 * cp_search.EFFORT_PER_ACTION)


KINDS = ("v", "loop", "single")


@given(
    limited_problems(max_p=2, max_m=3, kinds=KINDS) | limited_problems(max_p=3, max_m=2, kinds=KINDS),
    st.none() | st.lists(st.integers(0, 3), min_size=3, max_size=3),
)
@settings(max_examples=35)
def test_proves_the_optimum_of_a_plain_model(problem: Problem, alike: list[int] | None) -> None:
    """If the W's of a rank take equally long, the model orders them by what they release."""
    if alike is not None:
        n = problem.n_stages
        forward, inputs, weights = ((float(cost),) * n for cost in alike)
        problem = replace(problem, costs=Costs(forward, inputs, weights, problem.costs.p2p))
    start = serial(problem).orders
    result = refine(problem, start, lower_bound=0.0, effort=5.0)
    value = objective_of(problem, result.orders or start)
    assert result.proved
    assert result.lower_bound == pytest.approx(value)
    try:
        assert optimum(problem, objective_of(problem, start), effort=0.05) == pytest.approx(value)
    except RuntimeError:
        event("the plain model was too slow")


def test_proves_a_larger_problem_with_tight_memory_optimal() -> None:
    """Wrong implications of memory or a wrong dominance rule may do no harm in tiny problems.

    A rank's W's take equally long and release different amounts, so the model orders them.
    """
    costs = {"forward": [23, 22, 19, 19, 22, 24], "backward_input": [21, 22, 24, 23, 22, 26]}
    memory = {"forward": [2, 3] * 3, "backward_input": [-1, -2, -1, -1, -1, -1], "limit": 9}
    problem = parse_problem(
        {
            "pp_degree": 3,
            "microbatches": 8,
            "objective": "makespan",
            "costs": costs | {"backward_weight": 16, "p2p": 1},
            "memory": memory | {"backward_weight": [-1, -1, -1, -2, -1, -2]},
        }
    )
    start = min(priority_schedules(problem), key=lambda attempt: attempt.value).orders
    result = refine(problem, start, lower_bound=0.0, effort=5.0)
    assert result.proved
    assert objective_of(problem, result.orders or start) == pytest.approx(1271.0)


@pytest.mark.parametrize(("released", "favoured"), [((1.0, 2.0), 1), ((2.0, 1.0), 0), ((1.0, 1.0), 0)])
def test_of_two_ready_equal_weights_the_one_that_releases_more_runs_first(
    released: tuple[float, float], favoured: int
) -> None:
    """Lemma 29; of equal amounts, the first stage's. Weights that take different times run in any order."""
    plain = uniform(1, 1)
    memory = replace(plain.memory, forward=(2.0, 2.0), backward_weight=tuple(-amount for amount in released))
    inputs = tuple(amount - 2.0 for amount in released)
    problem = replace(plain, memory=replace(memory, backward_input=inputs))
    begin, other = ["0F0", "1F0", "1I0"], 1 - favoured
    last_first = [*begin, "0I0", f"{other}W0", f"{favoured}W0"]
    assert has_solution(problem, [*begin, "0I0", f"{favoured}W0", f"{other}W0"])
    assert not has_solution(problem, last_first)
    assert has_solution(problem, [*begin, "1W0", "0I0", "0W0"])  # the other one is not ready yet
    assert has_solution(
        replace(problem, costs=replace(problem.costs, backward_weight=(1.0, 2.0))), last_first
    )


@given(limited_problems(max_p=3, max_m=4))
@settings(max_examples=10)
def test_reports_ever_better_orders_and_bounds_and_repeats_them(problem: Problem) -> None:
    start = serial(problem).orders

    def run() -> tuple[ExactResult, list[tuple[float, Orders]], list[float]]:
        solutions: list[tuple[float, Orders]] = []
        bounds: list[float] = []
        listener = Listener(lambda orders, value: solutions.append((value, orders)), bounds.append)
        return refine(problem, start, lower_bound=0.0, effort=0.3, listener=listener), solutions, bounds

    result, solutions, bounds = run()
    for _, orders in solutions:
        verify_orders(problem, orders)
    worst_first = [objective_of(problem, start), *(value for value, _ in solutions)]
    assert all(later < earlier for earlier, later in pairwise(worst_first))
    assert all(later > earlier for earlier, later in pairwise([0.0, *bounds]))
    assert result.orders is (solutions[-1][1] if solutions else None)
    assert result.lower_bound == (bounds[-1] if bounds else 0.0) <= worst_first[-1] * (1 + 1e-9)
    assert run() == (result, solutions, bounds)


@given(limited_problems(max_p=3, max_m=5) | differing_problems(), st.floats(0, 0.8), st.floats(0.2, 1))
@settings(max_examples=40)
def test_only_the_window_changes_and_only_to_a_better_order(
    problem: Problem, at: float, share: float
) -> None:
    orders = first_in_first_out(serial(problem).orders, problem.n_stages, problem.arrays.kind_of)
    value = objective_of(problem, orders)
    begin, end, margin = at * value, (at + share) * value, 1e-6 * value
    search = CpSearch(problem, orders)
    improved = search.improve(begin, end, effort=0.2)
    event(f"improved: {improved}")
    if not improved:
        assert search.orders == orders
        return
    verify_orders(problem, search.orders)
    assert objective_of(problem, search.orders) < value
    is_span = problem.objective == "span"
    start = span_start_times(problem, orders) if is_span else earliest_times(problem, orders)[0]
    for rank in range(problem.pp_degree):
        part = start[orders.slice_of(rank)]
        first, last = int((part < begin - margin).sum()), int((part > end + margin).sum())
        # Microbatches of W's may change places with fused ones.
        old, new = (
            [(stage, letter, j if letter != "W" else 0) for stage, letter, j in each.actions(rank)]
            for each in (orders, search.orders)
        )
        assert old[:first] == new[:first]
        assert old[len(old) - last :] == new[len(new) - last :]
