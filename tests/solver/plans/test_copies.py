"""Copies to the host: format, times, memory, the verifier, the smallest limit, and the search."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.orders import copied_at_random, random_orders
from support.problems import with_copies
from support.reference import simulate
from zbv_solver.errors import InfeasibleMemory, InvalidInput, InvalidPlan
from zbv_solver.export import RENUMBERED, export
from zbv_solver.export.report import plan_view
from zbv_solver.export.report.figures import cards_of
from zbv_solver.improve.copies import plan_copies
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import plan_json
from zbv_solver.plans.reading import parse_plan
from zbv_solver.problem.jitter import Jitter
from zbv_solver.problem.numeric import exceeds
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_problem
from zbv_solver.problem.stages import Communication
from zbv_solver.search.assemble import make_plan
from zbv_solver.search.claims import check_plan
from zbv_solver.search.jitter import search_for_jitter
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search
from zbv_solver.timing.start_times import evaluate, execute, memory_profile
from zbv_solver.verify.verifier import verify_orders

COSTS: dict[str, Any] = {"forward": 18, "backward_input": 18, "backward_weight": 12, "p2p": 1, "offload": 12}
MEMORY: dict[str, Any] = {"forward": 2, "backward_input": -1, "backward_weight": -1}
PROBLEM: dict[str, Any] = {"pp_degree": 2, "microbatches": 4, "costs": COSTS, "memory": MEMORY}


@given(with_copies(), st.integers(0, 2**32))
def test_times_are_those_of_a_plain_simulation_and_no_bound_is_above(problem: Problem, seed: int) -> None:
    assert problem.copies is not None
    problem = replace(problem, copies=replace(problem.copies, host_limit=None))
    random = Random(seed)
    orders = copied_at_random(random_orders(problem, random), random)
    (expected,) = simulate(problem, orders)  # copies of a rank wait for nothing but its own list
    peaks = evaluate(problem, orders).peak_memory
    # At the limit that it needs, no bound is above it, though an order without copies may need more.
    plan = make_plan(replace(problem, memory=replace(problem.memory, limit=peaks)), orders, method="random")
    timing = evaluate(problem, orders)
    for rank in range(problem.pp_degree):
        own = [expected[action] for action in orders.actions(rank)]
        part = orders.slice_of(rank)
        np.testing.assert_allclose(timing.start[part], [start for start, _ in own], rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(timing.end[part], [end for _, end in own], rtol=1e-9, atol=1e-9)
    assert parse_plan(json.loads(json.dumps(plan_json(plan)))) == plan
    assert max(memory_profile(problem, orders)[0], default=0) <= max(timing.peak_memory) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("0O0", "0F0"), "0B0 on rank 0"),
        (("0F0", "0D0", "0R0", "0O0"), "0B0 on rank 0"),
        (("0F0", "0O0", "0D0"), "0B0 on rank 0"),
        (("0F0", "0O0", "0D0", "0R0", "0O0"), "0B0 on rank 0"),
        (("0F0", "1O0", "1D0", "1R0"), "does not have stage 1"),
    ],
)
def test_copies_out_of_place_are_refused(change: tuple[str, ...], message: str) -> None:
    problem = parse_problem(PROBLEM | {"microbatches": 1})
    ranks = [[*change, "3F0", "3B0", "0B0"], ["1F0", "2F0", "2B0", "1B0"]]
    orders = Orders.from_text(ranks)
    with pytest.raises(InvalidPlan, match=message):
        verify_orders(problem, orders)


def test_a_copy_after_all_actions_of_a_rank_is_refused_where_it_is() -> None:
    with pytest.raises(InvalidInput) as caught:
        Orders.from_text([["0F0", "1F0", "1B0", "0B0", "0O0"]])
    assert caught.value.issues[0].pointer == "/ranks/0/4"


def test_other_executors_refuse_copies_and_pictures_show_their_times() -> None:
    copied = [["0F0", "0O0", "0D0", "3F0", "3B0", "0R0", "0B0"], ["1F0", "2F0", "2B0", "1B0"]]
    plan = make_plan(parse_problem(PROBLEM | {"microbatches": 1}), Orders.from_text(copied), method="given")
    for name in sorted(RENUMBERED):
        with pytest.raises(InvalidInput, match="copies to the host"):
            export(plan, name)
    assert {card.label: card.value for card in cards_of(plan)}["Copies"] == "1 of 4"
    assert plan_view(plan).has_copies
    for name in ("svg", "html", "chrome-trace"):
        assert export(plan, name)
    with pytest.raises(InvalidPlan, match="without copies"):
        execute(plan.problem, plan.orders)
    with pytest.raises(InvalidInput, match="not simulated"):
        search_for_jitter(plan.problem, SearchOptions("quick"), jitter=Jitter.of(action=0.1))


def test_the_host_has_a_limit() -> None:
    problem = parse_problem(PROBLEM | {"microbatches": 1, "memory": MEMORY | {"host_limit": 1}})
    ranks = [["0F0", "0O0", "0D0", "0R0", "3F0", "3B0", "0B0"], ["1F0", "2F0", "2B0", "1B0"]]
    with pytest.raises(InvalidPlan, match="host"):
        verify_orders(problem, Orders.from_text(ranks))
    with pytest.raises(InvalidPlan, match=r"costs\.offload"):
        verify_orders(problem.without_copies(), Orders.from_text(ranks))


ZERO = dict.fromkeys(("forward", "backward_input", "backward_weight"), 0)
NOTHING = parse_problem(PROBLEM | {"costs": ZERO | {"offload": 0}, "memory": ZERO | {"host_limit": 0}})


@given(with_copies())
@example(NOTHING)
@settings(max_examples=15)
def test_the_smallest_limit_is_exact(problem: Problem) -> None:
    """A plan exists at the smallest limit, and less is refused."""
    least = problem.smallest_limit
    at_least = replace(problem, memory=replace(problem.memory, limit=least))
    plan = search(at_least, SearchOptions("quick"))
    assert not any(map(exceeds, plan.metrics.peak_memory, least))
    below = tuple(limit - 0.01 * max(abs(limit), 1e-3) for limit in least)
    if any(each < 0 for each in below):
        return
    with pytest.raises(InfeasibleMemory):
        search(replace(problem, memory=replace(problem.memory, limit=below)), SearchOptions("quick"))


def test_a_bound_is_proved_again_without_the_methods_that_know_no_copies() -> None:
    problem = parse_problem(PROBLEM | {"memory": MEMORY | {"limit": 4}})
    plan = search(problem, SearchOptions("quick"))
    assert plan.metrics.span < search(problem.without_copies(), SearchOptions("quick")).metrics.lower_bound
    check_plan(plan_json(plan), prove=True)
    stated = replace(plan.metrics, lower_bound=plan.metrics.span, gap=0.0, status="optimal")
    with pytest.raises(InvalidPlan, match="not supported"):
        check_plan(plan_json(replace(plan, metrics=stated)), prove=True)


def test_a_small_host_takes_the_stage_that_helps_most() -> None:
    """Stage 0 is needed last, and once its copy is on the host there is no room for that of stage 1."""
    problem = parse_problem(
        {
            "pp_degree": 1,
            "microbatches": 3,
            "placement": "loop",
            "chunks": 3,
            "costs": {"forward": 1, "backward_input": 1, "backward_weight": 1, "offload": 1},
            "memory": {
                "forward": [4, 5, 9],
                "backward_input": 0,
                "backward_weight": [-4, -5, -9],
                "limit": 13,
                "host_limit": 5,
            },
        }
    )
    assert list(problem.smallest_limit) == [13]
    assert search(problem, SearchOptions("quick")).metrics.peak_memory == (13,)


def test_copies_give_the_speed_of_more_memory_and_are_few() -> None:
    def problem(limit: float, **costs: float) -> Problem:
        memory = {"forward": 1, "backward_input": -0.5, "backward_weight": -0.5, "limit": limit}
        plain = {name: value for name, value in COSTS.items() if name != "offload"}
        return parse_problem({"pp_degree": 4, "microbatches": 12, "costs": plain | costs, "memory": memory})

    quick = SearchOptions("quick")
    whole, half = search(problem(8), quick), search(problem(4), quick)
    copied: Any = search(problem(4, offload=12), quick)
    gained = (half.objective - copied.objective) / (half.objective - whole.objective)
    assert gained > 0.5
    assert len(copied.orders.copies) // 3 < 0.75 * 8 * 12
    assert search(problem(24, offload=12), quick).orders.copies is None, "there is room for everything"
    assert plan_copies(problem(8, offload=12), whole.orders) == (whole.objective, whole.orders)


@given(with_copies(), st.floats(0, 1))
@settings(max_examples=10)
def test_a_plan_with_pairs_and_copies_is_no_longer_than_one_with_either(
    problem: Problem, share: float
) -> None:
    hidden = tuple(each / 2 for each in problem.costs.forward)
    least, room = problem.smallest_limit, problem.without_copies().smallest_limit
    limit = tuple(a + share * 2 * (b - a) for a, b in zip(least, room, strict=True))
    both = replace(
        problem,
        memory=replace(problem.memory, limit=limit),
        communication=Communication(hidden, (0.0,) * len(hidden), (0.0,) * len(hidden)),
    )
    quick = SearchOptions("quick")
    plan = search(both, quick)
    for other in (both.without_pairs(), both.without_copies()):
        try:
            assert plan.objective <= search(other, quick).objective * (1 + 1e-9)
        except InfeasibleMemory:
            assert other.copies is None


def test_pairs_and_copies_together_save_more_than_either() -> None:
    hidden = dict.fromkeys(("forward", "backward_input", "backward"), 6)
    both = parse_problem(
        {
            **{"pp_degree": 4, "microbatches": 12, "memory": MEMORY | {"limit": 0.55 * 16}},
            "costs": COSTS | {"communication": hidden, "pair_factor": 1.05},
        }
    )
    quick = SearchOptions("quick")
    plan = search(both, quick)
    assert plan.orders.paired is not None
    assert plan.orders.copies is not None
    assert plan.metrics.lower_bound <= plan.objective
    for other in (both.without_pairs(), both.without_copies()):
        assert plan.objective < 0.95 * search(other, quick).objective
