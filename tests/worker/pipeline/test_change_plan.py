"""A pipeline changes to another plan between two steps."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import zbv_solver
from support.gradients import require_gradients, train_plainly
from support.selfcheck import random_orders
from support.small_pipeline import batch, model
from support.thread_pipeline import on_ranks, plan_of, rank_of, returned
from torch import nn
from zbv_solver.plans.plan import Plan, identity
from zbv_solver.problem.writing import problem_json
from zbv_worker.errors import Disagreement, InvalidRun, PeerLost
from zbv_worker.pipeline.pipeline import Pipeline

STEPS = 4
mse = nn.functional.mse_loss


def shuffled(plan: Plan, seed: int) -> tuple[str, dict[str, Any]]:
    """Another plan of the same problem: its id, and the plan as a document."""
    orders, problem = random_orders(plan.problem, Random(seed)), problem_json(plan.problem)
    return identity(problem, orders.all_text()), {"problem": problem, "ranks": orders.all_text()}


@pytest.mark.parametrize(
    ("ranks", "placement", "replicas"), [(1, "v", 1), (2, "v", 1), (3, "single", 1), (2, "v", 2)]
)
def test_a_change_of_plan_does_not_change_the_training(ranks: int, placement: str, replicas: int) -> None:
    plan = plan_of(ranks, placement)
    others: list[tuple[str, Any]] = [shuffled(plan, 1), shuffled(plan, 2), (plan.plan_id, plan)]
    reference = model()
    means = [float(train_plainly(reference, mse, batch(step))) for step in range(STEPS)]

    def program(pipe: Pipeline) -> Any:
        ids, losses, actions = [], [], []
        for step in range(STEPS):
            losses.append(pipe.step(*batch(step)))
            ids.append(pipe.plan_id)
            actions.append([[str(action) for action in trace.actions] for trace in pipe.trace()])
            if step < len(others):
                pipe.change_plan(others[step][1])
        require_gradients(pipe, reference)
        return ids, losses, actions

    for ids, losses, actions in returned(on_ranks(plan, model, mse, program, replicas=replicas)):
        for changed, (_, document) in zip(actions[1:3], others, strict=False):
            assert changed == [each for each in document["ranks"] for _ in range(replicas)]
        assert ids == [plan.plan_id, *(plan_id for plan_id, _ in others)]
        if losses[0] is not None:
            assert [float(loss) for loss in losses] == pytest.approx(means, rel=1e-5)


def test_a_plan_that_does_not_fit_is_refused_and_the_pipeline_goes_on() -> None:
    plan, other = plan_of(2, "v"), plan_of(2, "v", microbatches=8)

    def program(pipe: Pipeline) -> None:
        pipe.step(*batch(0))
        with pytest.raises(InvalidRun, match="8 microbatches; a pipeline can only change to a plan with 2"):
            pipe.change_plan(other)
        pipe.step(*batch(1))

    returned(on_ranks(plan, model, mse, program))


def test_ranks_that_change_to_different_plans_say_so() -> None:
    plan = plan_of(2, "v")

    def program(pipe: Pipeline) -> None:
        pipe.change_plan(shuffled(plan, rank_of(pipe))[1])

    found = on_ranks(plan, model, mse, program)
    assert all(isinstance(each, Disagreement | PeerLost) for each in found)
    assert any(isinstance(each, Disagreement) for each in found)


def test_a_plan_with_other_layers_on_a_stage_is_refused() -> None:
    def plan(*costs: float) -> Plan:
        each = [
            {"name": f"n{at}", "forward": cost, "backward_input": cost, "backward_weight": cost}
            for at, cost in enumerate(costs)
        ]
        problem = {"pp_degree": 2, "microbatches": 4, "placement": "v", "layers": each}
        return zbv_solver.plan(zbv_solver.parse(problem), "quick")

    def program(pipe: Pipeline) -> str:
        with pytest.raises(InvalidRun, match="found a plan with another partition"):
            pipe.change_plan(plan(8, *[1] * 7))
        pipe.change_plan(plan(*[2] * 8))
        pipe.step(*batch(0))
        return pipe.plan_id

    def named() -> dict[str, nn.Module]:
        return {f"n{at}": layer for at, layer in enumerate([*model(), *model()])}

    assert on_ranks(plan(*[1] * 8), named, mse, program) == [plan(*[2] * 8).plan_id] * 2
