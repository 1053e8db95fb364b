"""Gradients of several steps add up until the user zeroes them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.thread_transport import ThreadHub
from torch import nn
from zbv_worker.gradients.buckets import SummedGradients
from zbv_worker.gradients.gradients import Accumulation, Gradients
from zbv_worker.stage.weight_grads import add_gradient

KINDS = ("in place", "apart", "replicas")


def module(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Linear(2, 1, bias=False).to(dtype)


def stepping(kind: str, made: nn.Module) -> Callable[..., float]:
    """Run a step that adds a number to every element of the gradient; returns the gradients after it."""
    gradients: Gradients = Gradients({0: made})
    if kind == "replicas":  # one of them, so that sums are those of this process
        gradients = SummedGradients({0: made}, ThreadHub(1, 1).transport(0))
    accumulation = Accumulation(gradients)
    (parameter,) = made.parameters()

    def step(number: float, factor: float = 1.0) -> float:
        accumulation.begin(in_place=kind == "in place")
        add_gradient(parameter, torch.full_like(parameter, number))
        if kind == "replicas":
            gradients.stage_done(0)
        gradients.finish(1.0)
        accumulation.end(factor)
        assert parameter.grad is not None
        assert parameter.grad.dtype == parameter.dtype
        (number,) = set(parameter.grad.flatten().tolist())
        return number

    return step


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_steps_add_up_until_zero_grad(kind: str, set_to_none: bool) -> None:
    made = module()
    step = stepping(kind, made)
    assert [step(1.0), step(2.0)] == [1.0, 3.0]
    made.zero_grad(set_to_none=set_to_none)
    assert step(5.0) == 5.0


@pytest.mark.parametrize("kind", ["apart", "replicas"])
def test_a_step_is_scaled_and_earlier_steps_are_not(kind: str) -> None:
    step = stepping(kind, module())
    assert [step(1.0, factor=4.0), step(2.0, factor=0.5)] == [4.0, 5.0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_the_user_writes_to_grad_counts(kind: str, dtype: torch.dtype) -> None:
    made = module(dtype)
    step, (parameter,) = stepping(kind, made), made.parameters()
    step(2.0)
    assert parameter.grad is not None
    parameter.grad.mul_(3.0)  # as clipping does
    assert step(1.0) == 7.0
    parameter.grad = torch.full_like(parameter, 10.0)
    assert step(1.0) == 11.0


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_is_summed_in_float32_over_steps(kind: str) -> None:
    """In bfloat16, 1 + 1/512 is 1: a sum that is rounded after each step would never grow."""
    step = stepping(kind, module(torch.bfloat16))
    step(1.0)
    assert [step(1 / 512) for _ in range(64)][-1] == 1.125


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replaced_gradients_go_on_with_the_sum(dtype: torch.dtype) -> None:
    made, transport = module(dtype), ThreadHub(1, 1).transport(0)
    accumulation = Accumulation(SummedGradients({0: made}, transport))
    (parameter,) = made.parameters()
    for number in (1.0, 2.0):
        accumulation.begin(in_place=False)
        add_gradient(parameter, torch.full_like(parameter, number))
        accumulation.gradients.stage_done(0)
        accumulation.gradients.finish(1.0)
        accumulation.end()
        accumulation.replace(lambda: SummedGradients({0: made}, transport))
    assert parameter.grad is not None
    assert parameter.grad.dtype == dtype
    assert parameter.grad.tolist() == [[3.0, 3.0]]
