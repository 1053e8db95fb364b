"""The split backward gives autograd's gradients, in two parts, on any module tree."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.functions import Function
from support.gradients import gradients_of, require_equal, split
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zbv_worker.stage.recorder import defer_weight_gradients
from zbv_worker.stage.weight_grads import WeightGrads

WIDTH = 6


def linear(**options: Any) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, **options)


class Low(nn.Linear):
    """A subclass that uses its weight differently."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) @ self.weight


def residual(self: Any, x: Tensor) -> Tensor:
    """Passes one gradient to its Linears and, after adding to it, further up: W may not see the addition."""
    for layer in self.layers:
        x = x + layer(x)
    return x


MODULES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "written to": (
        lambda: nn.Sequential(linear(), nn.ReLU(inplace=True), linear(bias=False), nn.ReLU(inplace=True)),
        2,
    ),
    "own parameter": (
        lambda: Function(
            lambda self, x: self.linear(x * self.scale) * self.scale,
            **{"linear": linear(), "scale": nn.Parameter(torch.randn(WIDTH))},
        ),
        1,
    ),
    "layer norm": (lambda: nn.Sequential(nn.LayerNorm(WIDTH), linear(), nn.RMSNorm(WIDTH)), 1),
    "convolution": (lambda: nn.Sequential(linear(), nn.Conv1d(5, 5, 3, padding=1)), 1),
    "subclass": (lambda: nn.Sequential(Low(WIDTH, WIDTH), linear()), 1),
    "multi-head attention": (
        lambda: Function(
            lambda self, x: self.attention(x, x, x, need_weights=False)[0],
            attention=nn.MultiheadAttention(WIDTH, 2, batch_first=True),
        ),
        0,
    ),
    "checkpointed": (
        lambda: Function(
            lambda self, x: checkpoint(self.inner, x, use_reentrant=False),
            inner=nn.Sequential(linear(), nn.GELU()),
        ),
        1,
    ),
    "residual": (lambda: Function(residual, layers=nn.ModuleList(linear() for _ in range(4))), 4),
    "no parameters": (nn.GELU, 0),
}
"""How to make each, and how many weight gradients it queues."""


@pytest.mark.parametrize(
    ("name", "needs_input"),
    # Without parameters and without an input that needs a gradient there is nothing to differentiate.
    [(name, needs) for name in MODULES for needs in (True, False) if needs or name != "no parameters"],
)
def test_two_microbatches_with_w_at_the_end_equal_autograd(name: str, needs_input: bool) -> None:
    torch.manual_seed(0)
    make, queued = MODULES[name]
    module = make()
    prepared = copy.deepcopy(module)
    queues = []
    for _ in range(2):
        x, grad_output = torch.randn(3, 5, WIDTH), torch.randn(3, 5, WIDTH)
        mine, theirs = x.clone().requires_grad_(needs_input), x.clone().requires_grad_(needs_input)
        module(theirs).backward(grad_output)
        queues.append(split(prepared, mine, grad_output))
        if needs_input:
            torch.testing.assert_close(mine.grad, theirs.grad)
    assert [len(queue) for queue in queues] == [queued] * 2
    for queue in reversed(queues):
        queue.run()
    require_equal(prepared, module)


def test_weight_gradients_appear_in_w_and_not_in_i() -> None:
    module = nn.Sequential(nn.Embedding(11, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    queue = split(module, torch.randint(11, (3, 5)), torch.randn(3, 5, WIDTH))
    assert len(queue) == 3
    assert not gradients_of([module])
    queue.run()
    assert len(queue) == 0
    assert len(gradients_of([module])) == 5


def test_weight_gradients_and_outputs_without_gradients_carry_no_graph() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    for _ in range(2):
        split(module, torch.randn(2, WIDTH), torch.randn(2, WIDTH)).run()
    assert [(p.grad.grad_fn, p.grad.requires_grad) for p in module.parameters() if p.grad is not None] == [
        (None, False)
    ] * 4
    with torch.no_grad(), defer_weight_gradients(module).into(WeightGrads()):
        assert module(torch.randn(2, WIDTH)).grad_fn is None


def test_module_trees_that_share_a_module_both_queue() -> None:
    shared = nn.Linear(WIDTH, WIDTH)
    one, two = nn.Sequential(shared), nn.Sequential(shared, nn.Linear(WIDTH, WIDTH))
    for module, queued in ((one, 1), (two, 2), (one, 1)):
        assert len(split(module, torch.randn(2, WIDTH), torch.randn(2, WIDTH))) == queued
