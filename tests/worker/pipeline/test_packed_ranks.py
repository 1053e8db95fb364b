"""Packed sequences of random lengths: losses and gradients are those of one process, for every plan."""

from __future__ import annotations

import pickle
from functools import cache, partial
from random import Random
from typing import Any

import pytest
import torch
from support.packed import (
    BLOCKS,
    PackedBatch,
    PlannedSteps,
    loss_sum,
    model,
    per_step_problem,
    require_trained,
    shape_of,
    trained_alone,
)
from support.plans import plan_document, searched, unit_problem
from support.selfcheck import random_orders
from support.thread_pipeline import on_ranks, returned
from torch import Tensor
from zbv_solver.construct.baselines import baseline
from zbv_solver.problem.reading import parse_problem
from zbv_worker import Pipeline

MICROBATCHES, SEEDS = 6, (1, 2)
LENGTHS = [[5, 9], [20], [3, 3, 8], [7, 1], [12], [9, 2]]
"""Of the sequences of every microbatch, for plans with features."""
SEQUENCES = [[0, 1], [2], [3, 4, 5], [6, 7], [8], [9, 10]]
BASELINES = ("1f1b", "interleaved-1f1b")
RANDOM = {"any order": 0.3, "any order, fused": 1.0, "any order, split": 0.0}
"""Plans in which microbatches overtake each other, and their share of fused backwards."""
OF_LENGTHS = {"headers": "parts", "stated": "parts", "in order": "planned"}
"""Ways to run a plan with features: how ranks know shapes, and how data are passed."""
# Who has which data: everyone, only who needs them, one rank, or everyone, cut by hand.
CASES = [
    (1, "V", "all ranks"),
    *((2, name, "all ranks") for name in (*BASELINES, "any order, fused", "any order, split")),
    (2, "V", "microbatches"),
    (4, "V", "parts"),
    (4, "any order", "data rank"),
]


@cache
def plan_of(p: int, name: str) -> Any:
    """A searched V, an order of others, or a random one, which may know the lengths."""
    if name == "of lengths":
        document = {
            **per_step_problem(p, MICROBATCHES),
            "sequences": LENGTHS,
            "memory": {
                "forward": {"tokens": 2},
                "backward_input": {"tokens": -1},
                "backward_weight": {"tokens": -1},
            },
        }
        of_lengths = parse_problem(document)
        return plan_document(of_lengths, random_orders(of_lengths, Random(p)))
    problem = unit_problem(p, MICROBATCHES)
    if name in BASELINES:
        return plan_document(*baseline(name, problem))
    if name in RANDOM:
        return plan_document(problem, random_orders(problem, Random(p), RANDOM[name]))
    return searched(problem)


Step = tuple[PackedBatch, Tensor, dict[str, Tensor]]
"""A batch, and the loss and gradients of one process."""


@cache
def equal_steps(seeds: tuple[int, ...] = SEEDS) -> list[Step]:
    """Steps for plans of equal microbatches."""
    batches = [PackedBatch.random(seed, MICROBATCHES) for seed in seeds]
    return [(batch, *trained_alone(batch)) for batch in batches]


@cache
def planned_steps() -> list[Step]:
    """Steps for a plan that knows the lengths."""
    lengths = [each for some in LENGTHS for each in some]
    batches = [PackedBatch.of_lengths(lengths, SEQUENCES, seed) for seed in SEEDS]
    return [(batch, *trained_alone(batch)) for batch in batches]


def given(pipe: Pipeline, batch: PackedBatch, mode: str) -> dict[str, Any]:
    """The arguments of a rank's call."""
    transport: Any = pipe._transport
    if mode == "data rank" and transport.rank != transport.world_size - 1:
        return {}
    if mode == "microbatches":
        return {"microbatches": batch.microbatches()}
    found: dict[str, Any] = {"inputs": batch.tokens, "targets": batch.targets, "cu_seqlens": batch.cu_seqlens}
    if mode == "parts":
        names = [name for name, _ in pipe.named_parameters()]
        for name, layer in (("inputs", 0), ("targets", BLOCKS + 1)):
            found[name] = found[name] if f"{layer}.weight" in names else None
    # If it is planned, the plan says which microbatch has which sequences.
    return found if mode == "planned" else {**found, "sequences": batch.sequences}


def trained(pipe: Pipeline, mode: str, steps: list[Step]) -> set[str]:
    """Compare evaluations and steps with one process; returns the shapes of the boundaries."""
    for batch, expected, gradients in steps:
        losses = [call(**given(pipe, batch, mode)) for call in (pipe.evaluate, pipe.step)]
        has_loss = f"{BLOCKS + 1}.weight" in dict(pipe.named_parameters())
        assert [loss is not None for loss in losses] == [has_loss] * 2
        for loss in losses if has_loss else []:
            torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        require_trained(pipe, gradients)
    return {str(boundary) for boundary in pipe.boundaries.values()}


@pytest.mark.parametrize(("p", "name", "mode"), CASES)
def test_losses_and_gradients_are_those_of_one_process(p: int, name: str, mode: str) -> None:
    more: dict[str, Any] = {"data_rank": p - 1} if mode == "data rank" else {}
    program = partial(trained, mode=mode, steps=equal_steps())
    returned(on_ranks(plan_of(p, name), model, loss_sum, program, ranks=p, **more))


@pytest.mark.parametrize(("p", "way"), [(2, "headers"), (4, "stated"), (1, "stated"), (4, "in order")])
def test_a_plan_may_know_the_lengths(p: int, way: str) -> None:
    """The boundaries show the largest shapes."""
    more: dict[str, Any] = {"shape_of": shape_of} if way == "stated" else {}
    program = partial(trained, mode=OF_LENGTHS[way], steps=planned_steps())
    for shown in returned(on_ranks(plan_of(p, "of lengths"), model, loss_sum, program, ranks=p, **more)):
        assert way != "stated" or shown == ({"[20, 8] float32"} if p > 1 else set())


@pytest.mark.parametrize("mode", ["all ranks", "data rank", "loader"])
def test_every_step_may_have_its_own_plan(mode: str) -> None:
    """The process of a loader makes most plans, which only one rank gets; otherwise the ranks make them.

    Between processes, the planner and its plans travel as pickles.
    """
    steps, p, unplanned = 4, 2, 1
    wanted = equal_steps(tuple(range(steps)))
    plans: list[Any] = [None] * steps
    if mode == "loader":
        source = pickle.loads(pickle.dumps(PlannedSteps(p, MICROBATCHES, unplanned)))
        plans = [pickle.loads(pickle.dumps(source[step])) for step in range(steps)]
        assert [plan is None for plan in plans] == [step == unplanned for step in range(steps)]

    def program(pipe: Pipeline) -> list[str]:
        transport: Any = pipe._transport
        ran = []
        for (batch, expected, gradients), plan in zip(wanted, plans, strict=True):
            loss = pipe.step(**given(pipe, batch, mode), plan=plan if transport.rank == 0 else None)
            if loss is not None:
                torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
            require_trained(pipe, gradients)
            ran.append(pipe.plan_id)
        return ran

    more: dict[str, Any] = {"data_rank": p - 1, "shape_of": shape_of} if mode == "data rank" else {}
    problem = per_step_problem(p, MICROBATCHES)
    first, second = returned(on_ranks("per-step", model, loss_sum, program, ranks=p, problem=problem, **more))
    assert first == second
    assert len(set(first)) == steps
    assert all(plan is None or plan.plan_id == ran for plan, ran in zip(plans, first, strict=True))
