"""Every plan computes the gradients of one process: over gloo between processes, and between threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import nested_model
from support.gradients import relative_error
from support.orders import copied_at_random
from support.plans import write_plan
from support.rank_files import found_by
from support.selfcheck import Gradients, hard_model, random_orders, reference_gradients, run_in_threads
from zbv_solver.construct.baselines import BASELINES, baseline
from zbv_solver.plans.channels import channels
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.stages import Copies, Costs, Memory, Placement, PlacementKind
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search
from zbv_solver.verify.verifier import verify_orders

TOLERANCE = 1e-5
MICROBATCHES = 8
RANKS = 3
KINDS: tuple[PlacementKind, ...] = ("v", "v", "loop", "single")
"""The placements of the random plans."""


def problem_of(placement: Placement, microbatches: int, seed: int = 0) -> Problem:
    random = Random(seed)

    def per_stage() -> tuple[float, ...]:
        return tuple(float(random.randint(1, 9)) for _ in range(placement.n_stages))

    return Problem(
        placement,
        microbatches,
        Costs(per_stage(), per_stage(), per_stage(), (1.0,) * (placement.n_stages - 1)),
        Memory.unlimited(placement),
    )


def cases() -> Iterator[tuple[str, Problem, Orders]]:
    """The plans that the processes run."""
    problem = problem_of(Placement.of("v", RANKS), MICROBATCHES)
    plan = search(problem, SearchOptions(effort="quick"))
    yield "search", plan.problem, plan.orders
    for name in BASELINES:
        yield (name, *baseline(name, problem))
    for seed, kind in enumerate(KINDS):
        problem = problem_of(Placement.of(kind, RANKS), MICROBATCHES, seed)
        yield f"random-{kind}-{seed}", problem, random_orders(problem, Random(seed))
    problem = problem_of(Placement.of("v", RANKS), MICROBATCHES)
    yield "nested", problem, random_orders(problem, Random(1))
    for name in ("copies", "nested-copies"):
        orders = copied_at_random(random_orders(problem, Random(2)), Random(2))
        once, none = (1.0,) * problem.n_stages, (0.0,) * problem.n_stages
        yield name, replace(problem, copies=Copies(once, once, none)), orders


@cache
def reference_of(seed: int, microbatches: int) -> tuple[Gradients, float]:
    return reference_gradients(hard_model(seed=seed), microbatches)


@cache
def nested_reference() -> tuple[Gradients, float]:
    gradients, loss, _ = nested_model.reference(MICROBATCHES)
    return gradients, loss


NAMES = ["search", *BASELINES, *(f"random-{kind}-{seed}" for seed, kind in enumerate(KINDS)), "nested"]
NAMES += ["copies", "nested-copies"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Every rank's gradients and losses by case; the processes are started once for all of them."""
    folder = tmp_path_factory.mktemp("ranks")
    for name, problem, orders in cases():
        verify_orders(problem, orders)
        write_plan(folder / f"{name}.plan.json", problem, orders)
    return found_by("support.selfcheck", RANKS, folder)


@pytest.mark.parametrize("name", NAMES)
def test_processes_over_gloo_have_the_gradients_of_one(results: list[dict[str, Any]], name: str) -> None:
    found: dict[str, torch.Tensor] = {}
    losses: list[float] = []
    for of_rank in results:
        gradients, own_losses = of_rank[name]
        found |= gradients
        losses += own_losses.values()
    is_nested = name.startswith("nested")
    reference, loss = nested_reference() if is_nested else reference_of(0, MICROBATCHES)
    assert relative_error(found, reference) <= (1e-6 if is_nested else TOLERANCE)
    assert sum(losses) / len(losses) == pytest.approx(loss, rel=1e-6)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    p=st.integers(1, 4),
    microbatches=st.integers(1, 6),
    kind=st.sampled_from(["v", "loop", "single"]),
    seed=st.integers(0, 2**32),
    fused=st.sampled_from([0.0, 0.5, 1.0]),
    look_ahead=st.integers(1, 4),
    is_copied=st.booleans(),
)
def test_any_valid_plan_computes_the_gradients_of_one_process(
    p: int, microbatches: int, kind: str, seed: int, fused: float, look_ahead: int, is_copied: bool
) -> None:
    """Microbatches overtake each other, W's come in any order, B's mix with I and W, copies come and go."""
    problem = problem_of(Placement.of(kind, p), microbatches)  # type: ignore[arg-type]  # a placement's name
    orders = random_orders(problem, Random(seed), fused)
    verify_orders(problem, orders)
    orders = copied_at_random(orders, Random(seed)) if is_copied else orders
    found, loss = run_in_threads(problem, orders, hard_model(seed=seed % 3), look_ahead=look_ahead)
    reference, right_loss = reference_of(seed % 3, microbatches)
    assert relative_error(found, reference) <= TOLERANCE
    assert loss == pytest.approx(right_loss, rel=1e-6)


def test_the_random_plans_really_are_out_of_order() -> None:
    """First-in, first-out plans would test little."""
    problem = problem_of(Placement.of("v", 2), MICROBATCHES)
    orders = random_orders(problem, Random(0), fused=0.3)
    first = [a.microbatch for a in orders.actions(0) if a.stage == 0 and a.letter == "F"]
    assert first != sorted(first)
    assert {a.letter for a in orders.actions(0)} == set("FIWB")
    assert any(
        list(c.transfers) != sorted(c.transfers, key=lambda t: t.microbatch)
        for c in channels(problem, orders)
    )
