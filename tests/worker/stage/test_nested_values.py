"""A stage takes and gives nested values, plain and recomputed; see also test_compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.functions import Function
from support.gradients import gradients_of, relative_error
from support.nested_model import NestedModel, reference
from support.stages import forth_and_back, run_step
from torch import Tensor, nn
from zbv_worker.errors import ModelError
from zbv_worker.stage.stage import Stage

CPU = torch.device("cpu")
MICROBATCHES = 3


def stages_of(n_stages: int, **options: Any) -> list[Stage]:
    model = NestedModel()
    found = []
    for index in range(n_stages):
        module = model.build_stage(index, n_stages, CPU)
        assert isinstance(module, nn.Sequential)
        loss = model.loss if index == n_stages - 1 else None
        layers = tuple(module)
        found.append(Stage(index, n_stages, module, MICROBATCHES, loss, layers=layers, **options))
    return found


@pytest.mark.parametrize("letters", ["IW", "B"])
@pytest.mark.parametrize("n_stages", [1, 2, 4])
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_stages_compute_right_gradients(n_stages: int, letters: str, *, is_recomputed: bool) -> None:
    stages = stages_of(n_stages, is_recomputed=is_recomputed)
    data = [NestedModel().microbatch(0, j) for j in range(MICROBATCHES)]
    losses = run_step(stages, [(x.input, x.target, x.keywords) for x in data], split="W" in letters)
    assert all(stage.held == (set(), set()) for stage in stages)
    gradients, loss, auxiliary = reference(MICROBATCHES)
    assert relative_error(gradients_of(stage.module for stage in stages), gradients) < 1e-6
    assert float(sum(losses)) / MICROBATCHES == pytest.approx(loss, rel=1e-6)
    assert sum(float(stage.auxiliary.take_sum()) for stage in stages) == pytest.approx(auxiliary, rel=1e-6)
    assert sum(float(stage.auxiliary.take_sum()) for stage in stages) == 0


class Pass(nn.Module):
    """Returns its first argument changed, the second as it is, and an integer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.linear(x), y, torch.arange(2)


def middle(module: nn.Module, **options: Any) -> Stage:
    return Stage(1, 3, module, 1, **options)


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_a_tensor_that_is_returned_unchanged_gets_its_gradient_back(*, is_recomputed: bool) -> None:
    stage = middle(Pass(), is_recomputed=is_recomputed)
    x, y = torch.rand(2, 3, requires_grad=True), torch.rand(3, requires_grad=True)
    output = stage.forward(0, (x, y), split=True)
    assert [tensor.requires_grad for tensor in output] == [True, True, False]
    assert all(tensor.grad_fn is None for tensor in output)
    of_y = torch.rand(3)
    _, found = stage.backward_input(0, (torch.rand(2, 3), of_y))
    assert torch.equal(found, of_y)
    assert y.grad is None


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_a_tensor_without_gradient_stays_without(*, is_recomputed: bool) -> None:
    stage = middle(Pass(), is_recomputed=is_recomputed)
    output = stage.forward(0, (torch.rand(2, 3, requires_grad=True), torch.rand(3)), split=False)
    assert [tensor.requires_grad for tensor in output] == [True, False, False]
    assert len(stage.backward(0, (torch.rand(2, 3),))) == 1


def test_an_unused_tensor_gets_zeros() -> None:
    class Unused(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return x * 2, x.detach()

    stage = middle(Unused())
    x, y = torch.rand(2, requires_grad=True), torch.rand(3, requires_grad=True)
    output = stage.forward(0, (x, y), split=True)
    assert [tensor.requires_grad for tensor in output] == [True, False]
    of_x, of_y = stage.backward_input(0, (torch.ones(2),))
    assert of_x.tolist() == [2.0, 2.0]
    assert of_y.tolist() == [0.0, 0.0, 0.0]


def test_a_tensor_returned_twice_gets_both_gradients() -> None:
    one = torch.ones(2)
    stage = middle(Function(lambda _, x: [y := x * 3, y, x]))
    assert forth_and_back(stage, one, (one, 10 * one, 100 * one)).tolist() == [133.0, 133.0]


def test_a_frozen_stage_passes_nested_gradients_through() -> None:
    module = Pass().requires_grad_(False)
    stage = middle(module)
    x = torch.rand(2, 3, requires_grad=True)
    stage.forward(0, (x, torch.rand(3)), split=True)
    gradient = torch.rand(2, 3)
    (found,) = stage.backward_input(0, (gradient,))
    torch.testing.assert_close(found, gradient @ module.linear.weight)
    first = Stage(0, 2, Pass().requires_grad_(False), 1)
    output = first.forward(0, (torch.rand(2, 3), torch.rand(3)), split=True)
    assert not any(tensor.requires_grad for tensor in output)
    assert first.backward_input(0, ()) is None


def test_a_layer_may_write_to_the_dict_that_it_gets() -> None:
    def write(_: Any, found: dict[str, Any]) -> dict[str, Any]:
        found["x"] = found["x"] * 2
        return found

    for is_recomputed in (False, True):
        layers = (Function(write), Function(write))
        stage = middle(nn.Sequential(*layers), layers=layers, is_recomputed=is_recomputed)
        given = {"x": torch.ones(2, requires_grad=True)}
        assert stage.forward(0, given, split=True)["x"].tolist() == [4.0, 4.0]
        assert given["x"].tolist() == [1.0, 1.0]
        (found,) = stage.backward_input(0, (torch.ones(2),))
        assert found.tolist() == [4.0, 4.0]


def test_a_keyword_that_the_layer_before_gives_too_is_refused() -> None:
    stage = middle(Pass())
    with pytest.raises(ModelError, match="a Pass gets 'y' from the layer before and as a keyword"):
        stage.forward(0, (torch.rand(2, 3), torch.rand(3)), split=True, keywords={"y": torch.rand(3)})


def test_a_stage_knows_the_keywords_of_its_layers() -> None:
    assert not Stage(0, 2, nn.Sequential(nn.Linear(2, 2), nn.Tanh()), 1).takes_keywords
    stage = middle(nn.Sequential(nn.Tanh(), Pass()))
    assert stage.takes_keywords
    assert stage.keywords.untaken(["y", "z"]) == ["z"]
