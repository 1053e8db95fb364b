"""Packed sequences of random lengths: losses and gradients are those of one process, for every plan."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from support.plans import searched, unit_problem, write_plan
from support.rank_files import found_by
from support.selfcheck import random_orders
from zbv_solver.construct.baselines import baseline
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_problem
from zbv_solver.verify.verifier import verify_orders

MICROBATCHES = 6
MODES = ("all ranks", "parts", "data rank", "microbatches")
BASELINES = ("1f1b", "interleaved-1f1b")
RANDOM = {"any order": 0.3, "any order, fused": 1.0, "any order, split": 0.0}
"""Plans in which microbatches overtake each other, and their share of fused backwards."""


LENGTHS = [[5, 9], [20], [3, 3, 8], [7, 1], [12], [9, 2]]
"""Of the sequences of every microbatch, for plans with features."""
SEQUENCES = [[0, 1], [2], [3, 4, 5], [6, 7], [8], [9, 10]]
PLANNED = {"headers": "parts", "stated": "parts", "in order": "planned"}
"""Ways to run a plan with features: how ranks know shapes, and how data are passed."""


def planned(p: int) -> Plan:
    """A plan that knows the lengths."""
    of_tokens = {"tokens": 1.0, "tokens_squared": 0.05}
    document = {
        "pp_degree": p,
        "microbatches": MICROBATCHES,
        "sequences": LENGTHS,
        "costs": dict.fromkeys(("forward", "backward_input", "backward_weight"), of_tokens),
        "memory": {
            "forward": {"tokens": 2},
            "backward_input": {"tokens": -1},
            "backward_weight": {"tokens": -1},
        },
    }
    return searched(parse_problem(document))


def plans(p: int) -> Iterator[tuple[str, Problem, Orders]]:
    problem = unit_problem(p, MICROBATCHES)
    found = searched(problem)
    yield "V", found.problem, found.orders
    for name in BASELINES:
        yield (name, *baseline(name, problem))
    for name, fused in RANDOM.items():
        yield name, problem, random_orders(problem, Random(p), fused)
    of_lengths = planned(p)
    yield "of lengths", of_lengths.problem, of_lengths.orders


def cases(p: int) -> dict[str, dict[str, Any]]:
    """Every plan on two ranks, and the V with each way to pass data; fewer on one and on four ranks."""
    names = ["V", *BASELINES, *RANDOM] if p == 2 else ["V", "any order"]
    modes = {"V": MODES} if p == 2 else {"V": MODES[1:3]} if p > 2 else {}
    equal = {"microbatches": MICROBATCHES, "seeds": [1, 2]}
    lengths = {"lengths": [length for own in LENGTHS for length in own], "sequences": SEQUENCES}
    unequal = {
        f"of lengths, {name}": {"plan": "of lengths", "mode": mode, "stated": name == "stated", **lengths}
        for name, mode in PLANNED.items()
    }
    return {
        f"{name}, {mode}": {"plan": name, "mode": mode, **equal}
        for name in names
        for mode in modes.get(name, MODES[:1])
    } | {name: case | equal for name, case in unequal.items()}


@pytest.fixture(scope="module", params=[1, 2, 4], ids=lambda p: f"{p} ranks")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every rank found, by case; the processes are started once for all of them."""
    p: int = request.param
    folder = tmp_path_factory.mktemp(f"packed-{p}")
    for name, problem, orders in plans(p):
        verify_orders(problem, orders)
        write_plan(folder / f"{name}.json", problem, orders)
    (folder / "cases.json").write_text(json.dumps(cases(p)))
    return found_by("packed_rank", p, folder)


def test_losses_and_gradients_are_those_of_one_process(found: list[dict[str, Any]]) -> None:
    for case in cases(len(found)):
        assert max(rank[case]["gradients"] for rank in found) < 1e-5, case
        losses = [loss for rank in found for loss in rank[case]["losses"]]
        assert len(losses) == 4, case  # two steps and two evaluations
        assert max(losses) < 1e-6, case


def test_the_largest_shape_of_a_boundary_is_shown(found: list[dict[str, Any]]) -> None:
    for rank in found:
        shown = rank["of lengths, stated"]["boundaries"]
        assert set(shown.values()) <= {"[20, 8] float32"}
        assert bool(shown) == (len(found) > 1)
