"""Runs whose loss has parameters, whose optimizer keeps the gradients, and whose data have a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.plans import random_plan
from support.small_pipeline import batch, flat_gradients
from support.small_pipeline import model as small_model
from support.trained import Remembering, train_alone, train_in_threads
from torch import Tensor, nn
from zbv_worker.errors import ModelError
from zbv_worker.model.model import Model
from zbv_worker.run.options import TrainingOptions
from zbv_worker.transport.world import Layout

MICROBATCHES, STEPS = 3, 3


class Scaled(nn.Module):
    """A loss with a temperature: a sum and its weight, or the mean."""

    def __init__(self, *, is_mean: bool = False) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.is_mean = is_mean

    def forward(self, output: Tensor, target: Tensor) -> Any:
        error = (self.temperature * output - target).square()
        return error.mean() if self.is_mean else (error.sum(), error.numel())


def microbatch(step: int, index: int) -> tuple[Tensor, Tensor]:
    return batch(100 * step + index, rows=2)


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in parameters], lr=0.1)


def trained_alone(microbatches: int, clip_norm: float) -> list[Tensor]:
    module, loss = small_model(), Scaled(is_mean=True)
    parameters = [*module.parameters(), *loss.parameters()]
    stepper = torch.optim.SGD(parameters, lr=0.1)
    for step in range(STEPS):
        for index in range(microbatches):
            input, target = microbatch(step, index)
            torch.autograd.backward(loss(module(input), target) / microbatches)
        torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
        stepper.step()
        stepper.zero_grad()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize(("replicas", "is_mean"), [(1, True), (2, False)])
def test_a_run_trains_the_parameters_of_a_loss(replicas: int, *, is_mean: bool) -> None:
    models: list[tuple[list[nn.Module], Scaled]] = []

    def model() -> Model:
        made, loss = [*small_model()], Scaled(is_mean=is_mean)
        models.append((made, loss))
        given: dict[str, Any] = {"loss": loss} if is_mean else {"loss_sum": loss}
        return Model(made, data=microbatch, optimizer=optimizer, **given)

    options = TrainingOptions(replicas=replicas, clip_norm=0.5)
    train_in_threads(*random_plan(seed=1), options, STEPS, model=model)
    expected = trained_alone(MICROBATCHES * replicas, clip_norm=0.5)
    layout = Layout(2, replicas)
    for replica in range(replicas):
        first, second = (models[layout.global_rank(position, replica)] for position in range(2))
        # In a V, rank 0 has the layers 0 and 3, and the loss.
        mine = [*first[0][0].parameters(), *second[0][1].parameters(), *second[0][2].parameters()]
        mine += [*first[0][3].parameters(), first[1].temperature]
        torch.testing.assert_close([each.detach() for each in mine], expected, rtol=1e-4, atol=1e-6)
        assert float(second[1].temperature.detach()) == 2.0


class Flat(torch.optim.SGD):
    """An optimizer whose gradients are parts of one buffer, which it made and reads."""

    def __init__(self, parameters: Any, lr: float):
        super().__init__(parameters, lr)
        self.parts = self.param_groups[0]["params"]
        self.flat = flat_gradients(self.parts)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure
        found = torch.split(self.flat, [parameter.numel() for parameter in self.parts])
        for parameter, gradient in zip(self.parts, found, strict=True):
            parameter -= self.param_groups[0]["lr"] * gradient.view_as(parameter)


def test_an_optimizer_may_keep_the_gradients_of_a_run() -> None:
    replicas = 2
    options = TrainingOptions(replicas=replicas)
    found = train_in_threads(*random_plan(seed=1), options, STEPS, optimizer=Flat)
    expected, _, _ = train_alone(MICROBATCHES * replicas, STEPS)
    for parameters in found.parameters:
        torch.testing.assert_close(parameters, expected, rtol=1e-4, atol=1e-5)


class WithGraph(Remembering):
    """A model whose data come from a trainable module."""

    embedding = nn.Parameter(torch.ones(()))

    def microbatch(self, step: int, index: int) -> Any:
        input, target = super().microbatch(step, index)
        return input, target * self.embedding


def test_data_with_a_graph_are_refused() -> None:
    with pytest.raises(ModelError, match="microbatch returned a tensor that requires"):
        train_in_threads(*random_plan(seed=1), TrainingOptions(), 1, model=WithGraph)
