"""A stage holds what its plan states: the graph from F to I or B, the queue from I to W."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.functions import Function
from support.gradients import gradients_of
from support.stages import backward, forth_and_back
from torch import Tensor, nn
from zbv_worker.errors import ModelError
from zbv_worker.measure.live_bytes import LiveBytes
from zbv_worker.stage.stage import Stage

WIDTH, ROWS = 32, 16
TENSOR = WIDTH * ROWS * 4


def middle(module: nn.Module) -> Stage:
    return Stage(1, 3, module, microbatches=4)


def data() -> Tensor:
    return torch.randn(ROWS, WIDTH)


def test_bytes_held_follow_the_actions() -> None:
    """Two Linears with a GELU between them: live bytes and microbatches after every action, exactly."""
    stage = middle(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)))
    forth_and_back(stage, data(), data(), microbatch=9)  # creates the parameters' gradients
    none = set[int]()
    with LiveBytes() as live:
        stage.forward(0, data(), split=True)
        assert live.bytes == 3 * TENSOR  # input, GELU's input, second Linear's input; not the output
        stage.forward(1, data(), split=False)
        assert (live.bytes, stage.held) == (6 * TENSOR, ({0, 1}, none))
        stage.backward_input(0, data())
        assert (live.bytes, stage.held) == (7 * TENSOR, ({1}, {0}))  # both Linears' inputs, output gradients
        stage.backward(1, data())
        assert (live.bytes, stage.held) == (4 * TENSOR, (none, {0}))
        stage.backward_weight(0)
        assert (live.bytes, stage.held) == (0, (none, none))


def test_the_output_and_the_input_gradient_are_detached() -> None:
    stage = middle(nn.Linear(WIDTH, WIDTH))
    assert not stage.forward(0, data(), split=True).requires_grad
    gradient: Any = stage.backward_input(0, data())
    assert gradient.shape == (ROWS, WIDTH)
    assert not gradient.requires_grad


def test_the_first_stage_propagates_in_i_and_not_in_w() -> None:
    """Its input needs no gradient, yet I must reach every layer, because W runs no backward."""
    reached: list[str] = []

    def watch(_: nn.Module, x: Tensor) -> Tensor:
        y = x * 2.0
        y.register_hook(lambda _: reached.append("backward"))  # type: ignore[no-untyped-call]  # torch's
        return y

    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    stage = Stage(0, 2, nn.Sequential(first, Function(watch), second), microbatches=1)
    stage.forward(0, data(), split=True)
    assert stage.backward_input(0, data()) is None
    assert (reached, gradients_of([first])) == (["backward"], {})
    stage.backward_weight(0)
    assert (reached, len(gradients_of([first]))) == (["backward"], 2)


def test_the_last_stage_returns_its_loss_and_scales_gradients_by_the_number_of_microbatches() -> None:
    """And by the loss scale, which may change from step to step."""
    module = nn.Linear(WIDTH, WIDTH)
    stage = Stage(1, 2, module, microbatches=4, loss=nn.functional.mse_loss)
    x, target = data(), data()
    expected = nn.functional.mse_loss(module(x), target)
    (gradient,) = torch.autograd.grad(expected, module.weight)
    for scale in (1.0, 8.0, 0.5):
        stage.loss_scale = scale
        module.zero_grad()
        torch.testing.assert_close(stage.forward(0, x, target, split=True), expected.detach())
        backward(stage)
        torch.testing.assert_close(module.weight.grad, gradient * scale / 4)


def test_a_stage_may_be_the_identity_or_a_view() -> None:
    stage = middle(nn.Sequential(nn.Identity()))
    x, gradient = data(), data()
    torch.testing.assert_close(stage.forward(0, x, split=True), x)
    torch.testing.assert_close(backward(stage, gradient), gradient)
    stage = middle(nn.Flatten(0, 1))
    assert stage.forward(0, x, split=False).shape == (ROWS * WIDTH,)
    torch.testing.assert_close(stage.backward(0, gradient.flatten()), gradient)


def test_a_frozen_stage_passes_gradients_through_and_an_unused_input_gets_zeros() -> None:
    frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    assert forth_and_back(Stage(0, 2, frozen, microbatches=1), data(), data()) is None
    ignoring = middle(Function(lambda _, x: torch.ones_like(x)))
    assert not forth_and_back(ignoring, data(), data()).any()


def test_stages_that_break_the_protocol_are_refused() -> None:
    with pytest.raises(ModelError, match=r"stage 1: found a object at \[1\] between stages; must be tensors"):
        middle(Function(lambda _, x: (x, object()))).forward(0, data(), split=True)
    with pytest.raises(ModelError, match="takes the loss"):
        Stage(1, 2, nn.Identity(), microbatches=1)
