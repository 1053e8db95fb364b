"""A run trains microbatches of different lengths, with a plan that has features, like one process."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import pytest
import torch
from support.gradients import relative_error
from support.selfcheck import random_orders
from support.trained import Remembering, train_alone, train_in_threads
from torch import Tensor
from zbv_service.client.answers import read_rank
from zbv_service.documents.problems import pack
from zbv_service.plans.renderings import ranks_of
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import plan_json
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.assemble import make_plan
from zbv_worker.errors import ModelError
from zbv_worker.execution.rank_plan import RankPlan, by_microbatch
from zbv_worker.run.options import TrainingOptions

LENGTHS = (1, 5, 3, 5)
STEPS = 3


class Unequal(Remembering):
    """Two sequences of another length in every microbatch; evaluations have other lengths again."""

    def microbatch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        words, target = super().microbatch(step, index)
        return words[:, : LENGTHS[index]], target[:, : LENGTHS[index]]

    def evaluation_microbatch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        words, target = super().microbatch(step, index)
        return words[:, index:], target[:, index:]


class Summed(Unequal):
    def loss_sum(self, output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return (output - target).square().sum(), target.numel()


class Stated(Summed):
    def shape_of(self, features: Mapping[str, float]) -> Tensor:
        return torch.empty(2, int(features["tokens"]) // 2, 12, device="meta")


def stating(shape_of: Callable[[Any], Any]) -> type[Summed]:
    """Models that state something else."""
    return type("Other", (Summed,), {"shape_of": lambda self, features: shape_of(features)})


def plan() -> tuple[Problem, Orders]:
    problem = parse_problem(
        {
            "pp_degree": 2,
            "microbatches": len(LENGTHS),
            "features": {"tokens": [2 * length for length in LENGTHS]},
            "costs": {"forward": {"tokens": 1}, "backward_input": {"tokens": 1}, "backward_weight": 1},
        }
    )
    return problem, random_orders(problem, Random(0))


@pytest.mark.parametrize("model", [Summed, Stated])
def test_training_equals_one_process(model: type[Summed]) -> None:
    found = train_in_threads(*plan(), TrainingOptions(evaluate_every=1), STEPS, model=model)
    expected, losses, _ = train_alone(len(LENGTHS), STEPS, model=Summed)
    assert found.losses == pytest.approx(losses, rel=1e-5)
    assert relative_error(found.parameters[0], expected) < 1e-5


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Unequal, "means over microbatches with targets of 34 to 170 numbers"),
        (
            stating(lambda features: torch.empty(2, int(features["tokens"]), 12, device="meta")),
            r"but shape_of returns \[2, \d+, 12\] float32 for this microbatch",
        ),
        (stating(lambda _: torch.empty(2)), "shape_of returned a tensor on cpu; must be on the meta device"),
        (stating(lambda features: features["images"]), r"shape_of failed .*tokens = 2: KeyError: 'images'"),
        (stating(lambda _: (2, 2)), r"shape_of returned \(2, 2\) .*tokens = 2; must return what"),
    ],
)
def test_what_does_not_fit_is_refused(model: type[Summed], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        train_in_threads(*plan(), TrainingOptions(), 1, model=model)


def test_ranks_get_the_features_with_their_part_of_a_plan() -> None:
    problem, orders = plan()
    packed = pack(plan_json(make_plan(problem, orders, method="random")))
    for rank, text in enumerate(ranks_of(packed)):
        features = read_rank(json.loads(text)).features
        assert features == {"tokens": tuple(2.0 * length for length in LENGTHS)}
        assert by_microbatch(features) == RankPlan.of("plan", problem, orders, rank).features
