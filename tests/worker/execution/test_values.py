"""Nested values, keywords and auxiliary losses: every plan computes the gradients of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.functions import Function
from support.nested_model import NestedModel, reference
from support.plans import random_plan
from support.trained import Remembering, train_in_threads
from torch import Tensor, nn
from zbv_worker.errors import ModelError
from zbv_worker.model.checks import checked_microbatch
from zbv_worker.run.options import TrainingOptions

MICROBATCHES = 4


class Wrong(Remembering):
    """Its microbatches have a keyword that no layer takes."""

    def microbatch(self, step: int, index: int) -> Any:
        return (*super().microbatch(step, index), {"more": 1})


@pytest.mark.parametrize("p", [1, 2])
def test_a_keyword_that_no_layer_takes_is_refused(p: int) -> None:
    with pytest.raises(ModelError, match="the keyword 'more', and no layer of the model takes it"):
        train_in_threads(*random_plan(p, MICROBATCHES), TrainingOptions(), 1, model=Wrong)


class Paired(Remembering):
    def loss(self, output: Tensor, target: Tensor) -> Any:
        return super().loss(output, target), torch.tensor(1.0)


def test_a_training_needs_loss_sum_for_pairs() -> None:
    with pytest.raises(ModelError, match=r"returned a pair of sum and weight.* Rename the method"):
        train_in_threads(*random_plan(2, MICROBATCHES), TrainingOptions(), 1, model=Paired)


@pytest.mark.parametrize("replicas", [1, 2])
def test_training_and_evaluation_have_the_same_losses(replicas: int) -> None:
    """The evaluation comes first, and no tensor requires a gradient there."""
    options = TrainingOptions(evaluate_every=1, replicas=replicas)
    found = train_in_threads(*random_plan(2, MICROBATCHES // replicas), options, 2, model=NestedModel)
    evaluations = next(report.evaluations for report in found.reports if report.evaluations)
    assert found.losses[0] == pytest.approx(reference(MICROBATCHES)[1], rel=1e-6)
    assert evaluations[0] == pytest.approx(found.losses[0], rel=1e-6)
    assert evaluations[1] < evaluations[0]


class Nothing(Remembering):
    """Its stages pass on None."""

    def build_stage(self, stage: int, n_stages: int, device: torch.device) -> nn.Module:
        last = Function(lambda self, _: self.linear(torch.ones(1, 3)), linear=nn.Linear(3, 2))
        self.built.append(last if stage == n_stages - 1 else Function(lambda *_: None))
        return self.built[-1]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return output.square().mean()


def test_a_stage_may_pass_on_nothing() -> None:
    found = train_in_threads(*random_plan(2, MICROBATCHES), TrainingOptions(), 2, model=Nothing)
    assert found.losses[1] < found.losses[0]


@pytest.mark.parametrize(
    ("microbatch", "message"),
    [
        (torch.zeros(1), "microbatch returned a Tensor; must be a Microbatch, .input, target."),
        ((1,), "microbatch returned a tuple of 1 values"),
        ((1, 2, 3), "microbatch returned a tuple of 3 values; .* with a dict of keywords"),
    ],
)
def test_data_of_another_form_is_refused(microbatch: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        checked_microbatch(microbatch)
