"""CP-SAT finds the best orders with pairs or copies of small problems, and proves no bound above them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.problems import uniform
from zbv_solver.construct.dispatch import serial
from zbv_solver.errors import InvalidPlan
from zbv_solver.improve.cp_entries import refine_entries
from zbv_solver.plans.orders import Action, Orders
from zbv_solver.problem.problem import Objective, Problem
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.offload import CopySearch, serial_with_copies, without_needless_copies
from zbv_solver.search.options import SearchOptions
from zbv_solver.timing.start_times import objective_of
from zbv_solver.verify.verifier import verify_orders


def lists(stages: tuple[int, ...], m: int) -> Iterator[list[Action]]:
    """Every list of a rank in which microbatches ascend, by actions one after the other."""
    cells = [(stage, j) for stage in stages for j in range(m)]
    follows = {"": "F", "F": "IB", "I": "W"}

    def extended(done: list[Action], last: dict[tuple[int, int], str]) -> Iterator[list[Action]]:
        if all(last[cell] in ("W", "B") for cell in cells):
            yield done
        for stage, j in cells:
            for letter in follows.get(last[stage, j], ""):
                of_kind = letter.replace("B", "I")
                is_next = all(_has(last[stage, k], of_kind) for k in range(j))
                if is_next:
                    yield from extended([*done, Action(stage, letter, j)], {**last, (stage, j): letter})

    return extended([], dict.fromkeys(cells, ""))


def _has(last: str, letter: str) -> bool:
    """Whether a cell whose last action is this one has had the letter; a W in any order."""
    return {"F": last != "", "I": last in ("I", "W", "B"), "W": True}[letter]


def best_by_enumeration(problem: Problem) -> float:
    """The least objective of all orders and all pairs of neighbours in them."""
    m, best = problem.microbatches, np.inf
    for ranks in product(*(lists(stages, m) for stages in problem.placement.stages_of)):
        orders = Orders.from_text([[str(action) for action in rank] for rank in ranks])
        flat = [action for rank in ranks for action in rank]
        ends = set(np.cumsum([len(rank) for rank in ranks]).tolist())
        places = [
            at
            for at, (one, two) in enumerate(pairwise(flat))
            if one.letter == "F" and two.letter in "IB" and one[2] != two[2] and at + 1 not in ends
        ]
        for chosen in product((False, True), repeat=len(places)):
            paired = np.zeros(len(flat), np.bool_)
            paired[[at for at, is_so in zip(places, chosen, strict=True) if is_so]] = True
            made = replace(orders, paired=paired if paired.any() else None)
            try:
                verify_orders(problem, made)
            except InvalidPlan:
                continue
            best = min(best, objective_of(problem, made))
    return best


@example((1, 3), (9, 5, 3, 6), (0, 1, 2), 3, "makespan")  # B pays only in a pair, as it hides more
@example((1, 3), (4, 4, 6, 9), (3, 3, 1), 2, "makespan")  # or as I has more to hide than there is time
@settings(max_examples=20)
@given(
    st.sampled_from([(2, 2), (1, 3)]),
    st.tuples(*[st.integers(3, 9)] * 4),
    st.tuples(*[st.integers(0, 3)] * 3),
    st.sampled_from([None, 2, 3]),
    st.sampled_from(["span", "makespan"]),
)
def test_no_order_with_pairs_is_better_than_the_one_found(
    shape: tuple[int, int], costs: Any, hidden: Any, limit: int | None, objective: Objective
) -> None:
    """B is at least as long as I, and stages are alike but for the first."""
    forward, inputs, weights, fused = costs
    p, m = shape
    problem = uniform(
        p,
        m,
        placement="single",
        objective=objective,
        costs={
            "forward": [forward, *[5] * (p - 1)],
            "backward_input": inputs,
            "backward_weight": weights,
            "backward": inputs + fused - 3,
            "p2p": 1,
            "communication": dict(zip(("forward", "backward_input", "backward"), hidden, strict=True)),
        },
        memory={"forward": 1, "backward_input": -0.5, "backward_weight": -0.5, "limit": limit},
    )
    begin = serial(problem.without_pairs()).orders
    result = refine_entries(problem, begin, effort=1)
    best = best_by_enumeration(problem)
    assert objective_of(problem, result.orders or begin) == pytest.approx(best)
    assert result.proved
    assert result.lower_bound == pytest.approx(best)


def test_a_change_on_two_ranks_leads_to_the_best_copies() -> None:
    """Annealing ends at 61, because no move of one rank leads on."""
    costs = {
        "forward": [6, 1, 3, 2],
        "backward_input": [5, 6, 5, 1],
        "backward_weight": [6, 6, 3, 5],
        "p2p": 1,
        "offload": [3, 2, 1, 3],
        "reload": [2, 4, 6, 6],
    }
    memory = {"forward": 2, "backward_input": -1, "backward_weight": -1, "offloadable": 2, "limit": 4}
    problem = uniform(2, 2, placement="v", costs=costs, memory=memory)
    ranks = [
        "0F0 0O0 0F1 0D0 3F0 3I0 3W0 3F1 3I1 3W1 0R0 0I0 0W0 0I1 0W1",
        "1F0 1O0 2F0 1D0 1F1 1O1 1D1 2F1 2I0 2W0 1R0 2I1 1I0 1R1 1I1 1W0 2W1 1W1",
    ]
    annealed = Orders.from_text([entries.split() for entries in ranks])
    assert objective_of(problem, annealed) == 61
    running = CopySearch(problem, SearchOptions("standard"), None, None)
    running.keep(61, annealed, "annealed")
    running.refine()
    plan = running.plan()
    assert plan.objective == plan.metrics.lower_bound == 60


def test_what_an_action_of_a_pair_keeps_may_be_copied() -> None:
    """An order takes 15.5, so a bound above that is wrong."""
    costs = {
        **{"forward": 1, "backward_input": [2, 1], "backward_weight": [1, 2], "offload": 1, "reload": 2},
        **{"communication": {"forward": 1, "backward_input": 1, "backward": 3}, "pair_factor": 1.25},
    }
    memory = {"forward": [1, 0], "backward_input": 0, "backward_weight": [-1, 0], "static": 1, "limit": 2}
    problem = parse_problem({"pp_degree": 1, "microbatches": 2, "costs": costs, "memory": memory})
    result = refine_entries(problem, serial_with_copies(problem), effort=1)
    assert result.orders is not None
    verify_orders(problem, result.orders)
    assert (result.lower_bound, result.proved) == (15.5, True)
    assert objective_of(problem, result.orders) == 15.5


def test_copies_that_an_order_does_not_need_are_dropped() -> None:
    memory = {"forward": 2, "backward_input": -1, "backward_weight": -1, "offloadable": 2, "limit": 4}
    costs = {"forward": 6, "backward_input": 5, "backward_weight": 6, "offload": 1, "reload": 1}
    problem = uniform(2, 2, placement="v", costs=costs, memory=memory)
    orders = serial_with_copies(problem)
    assert orders.copies is not None
    assert without_needless_copies(problem, orders).copies is None  # one microbatch at a time fits


def test_a_copy_out_may_wait_for_a_later_one_that_is_shorter() -> None:
    costs: dict[str, Any] = {**dict.fromkeys(("forward", "backward_input", "backward_weight"), 1), "p2p": 2}
    memory = {"forward": 2, "backward_input": -1, "backward_weight": -1, "offloadable": 2, "limit": 4}
    costs |= {"offload": [1, 5, 1, 1], "reload": 1}
    problem = uniform(2, 2, placement="v", costs=costs, memory=memory)
    result = refine_entries(problem, serial_with_copies(problem), effort=1)
    assert result.orders is not None
    assert objective_of(problem, result.orders) == result.lower_bound == 24
