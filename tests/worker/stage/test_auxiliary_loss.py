"""Losses that layers add: their gradients are those of the sum of all losses, and each counts once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.stages import backward
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zbv_worker.errors import ModelError
from zbv_worker.stage.loss import WeightedLoss, add_auxiliary_loss
from zbv_worker.stage.stage import Stage

WIDTH, MICROBATCHES = 4, 3


class Balanced(nn.Module):
    """Adds a loss itself, as a layer of experts does."""

    def __init__(self, weight: float | None = None, *, checkpoints: bool | None = None):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.weight = weight
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Any:
        return (
            self.run(x)
            if self.checkpoints is None
            else checkpoint(self.run, x, use_reentrant=self.checkpoints)
        )

    def run(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        y = add_auxiliary_loss(y, balance(y), self.weight)
        return (y + 1.0) * x


def balance(y: Tensor) -> Tensor:
    return y.square().mean() * 0.7


def data(j: int) -> Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(j))


def run(stage: Stage, *, split: bool) -> None:
    for j in range(MICROBATCHES):
        stage.forward(j, data(j), split=split)
    for j in range(MICROBATCHES):
        backward(stage, torch.ones(5, WIDTH), split=split, microbatch=j)


def expected(layer: Balanced, factor: float) -> tuple[Tensor, float]:
    """The gradient of the weight by hand, and the sum of the losses."""
    layer.zero_grad()
    total = 0.0
    for j in range(MICROBATCHES):
        x = data(j)
        y = torch.tanh(layer.linear(x))
        ((y + 1) * x).sum().backward()  # type: ignore[no-untyped-call]  # torch's own
        loss = balance(torch.tanh(layer.linear(x)))
        (loss * factor).backward()  # type: ignore[no-untyped-call]  # torch's own
        total += float(loss.detach())
    assert layer.linear.weight.grad is not None
    return layer.linear.weight.grad, total


@pytest.mark.parametrize(("checkpoints", "replicas"), [(None, 2), (False, 1), (True, 1)])
@pytest.mark.parametrize("is_recomputed", [False, True])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("weight", [None, 5.0])
def test_gradients_and_sum_are_those_of_one_loss(
    replicas: int, weight: float | None, *, split: bool, is_recomputed: bool, checkpoints: bool | None
) -> None:
    """If the main loss has a weight, the others have one too."""
    layer = Balanced(weight, checkpoints=checkpoints)
    stage = Stage(1, 3, layer, MICROBATCHES * replicas, is_recomputed=is_recomputed)
    stage.is_weighted, stage.loss_scale = weight is not None, 8.0
    run(stage, split=split)
    found, counts = layer.linear.weight.grad, weight or 1.0
    gradient, total = expected(layer, counts * 8.0 / (MICROBATCHES * replicas))
    torch.testing.assert_close(found, gradient)
    assert float(stage.auxiliary.take_sum()) == pytest.approx(counts * total, rel=1e-6)
    assert stage.auxiliary.take_sum() == 0.0


def test_with_a_weighted_loss_a_weight_is_required() -> None:
    stage = Stage(0, 1, Balanced(), 1, WeightedLoss(lambda y, t: (y.sum(), torch.tensor(1.0))))
    with pytest.raises(ModelError, match="needs a weight, because the model's loss is a sum with a weight"):
        stage.forward(0, data(0), torch.zeros(()), split=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_in_half_precision_have_the_same_gradients(dtype: torch.dtype) -> None:
    layer = Balanced()
    stage = Stage(1, 3, layer, MICROBATCHES, autocast=dtype)
    stage.loss_scale = 64.0
    run(stage, split=True)
    found = layer.linear.weight.grad
    gradient, _ = expected(layer, 64.0 / MICROBATCHES)
    assert found is not None
    assert float((found - gradient).norm() / gradient.norm()) < 0.02


def test_an_evaluation_does_not_count() -> None:
    stage = Stage(1, 3, Balanced(), 1)
    x = data(0)
    assert torch.equal(stage.evaluate(x), stage.forward(0, x, split=True))
    assert float(stage.auxiliary.take_sum()) > 0
    stage.evaluate(x)
    assert stage.auxiliary.take_sum() == 0.0


def test_the_last_stage_reports_its_loss_without_the_auxiliary_one() -> None:
    layer, x = Balanced(), data(0)
    stage = Stage(0, 1, layer, 1, lambda y, t: y.mean())
    loss = stage.forward(0, x, None, split=True)
    torch.testing.assert_close(loss, layer(x).mean().detach())


def test_outside_of_a_stage_backward_adds_the_gradient() -> None:
    linear = nn.Linear(WIDTH, WIDTH)
    x = data(0)
    y = linear(x)
    add_auxiliary_loss(y, balance(y)).sum().backward()  # type: ignore[no-untyped-call]  # torch's own
    found = linear.weight.grad
    linear.zero_grad()
    y = linear(x)
    (y.sum() + balance(y)).backward()
    torch.testing.assert_close(found, linear.weight.grad)


@pytest.mark.parametrize("loss", [torch.zeros(2), 1.0, torch.tensor(1)])
def test_a_loss_that_is_not_one_number_is_refused(loss: Any) -> None:
    with pytest.raises(ModelError, match="must be one floating-point number"):
        add_auxiliary_loss(torch.zeros(1), loss)
