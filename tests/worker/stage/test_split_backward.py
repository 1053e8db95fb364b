"""The split backward gives autograd's gradients, in two parts, on any module tree."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from zbv_worker.stage.recorder import defer_weight_gradients
from zbv_worker.stage.weight_grads import LinearGrad, WeightGrads

WIDTH = 6


class WrittenTo(nn.Module):
    """Modifies the outputs of its Linears in place."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.activation(self.two(self.activation(self.one(x))))
        return output


class Tied(nn.Module):
    """Two Linears share a weight, which is also used directly."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)
        self.two = nn.Linear(WIDTH, WIDTH, bias=False)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.two(torch.tanh(self.one(x))) @ self.one.weight
        return output


class OwnParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x * self.scale) * self.scale
        return output


class Low(nn.Linear):
    """A subclass that uses its weight differently."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) @ self.weight


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return output


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
        return output


MODULES: dict[str, Callable[[], nn.Module]] = {
    "written to": WrittenTo,
    "tied": Tied,
    "own parameter": OwnParameter,
    "layer norm": lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH)),
    "convolution": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Conv1d(5, 5, 3, padding=1)),
    "subclass": lambda: nn.Sequential(Low(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)),
    "weight norm": lambda: nn.Sequential(weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH)),
    "multi-head attention": Attention,
    "checkpointed": Checkpointed,
    "no parameters": nn.GELU,
}


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def split_backward(module: nn.Module, x: Tensor, grad_output: Tensor) -> WeightGrads:
    """Run F and I of one microbatch; the caller runs W."""
    queue = WeightGrads()
    with defer_weight_gradients(module).into(queue):
        module(x).backward(grad_output)
    return queue


def assert_same(found: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert found.keys() == right.keys()
    for name, expected in right.items():
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "needs_input"),
    # Without parameters and without an input that needs a gradient there is nothing to differentiate.
    [(name, needs) for name in MODULES for needs in (True, False) if needs or name != "no parameters"],
)
def test_two_microbatches_with_w_at_the_end_equal_autograd(name: str, needs_input: bool) -> None:
    torch.manual_seed(0)
    module = MODULES[name]()
    prepared = copy.deepcopy(module)
    queues = []
    for _ in range(2):
        x, grad_output = torch.randn(3, 5, WIDTH), torch.randn(3, 5, WIDTH)
        mine, theirs = x.clone().requires_grad_(needs_input), x.clone().requires_grad_(needs_input)
        module(theirs).backward(grad_output)
        queues.append(split_backward(prepared, mine, grad_output))
        if needs_input:
            torch.testing.assert_close(mine.grad, theirs.grad)
    for queue in reversed(queues):
        queue.run()
    assert_same(gradients(prepared), gradients(module))


def test_weight_gradients_appear_in_w_and_not_in_i() -> None:
    module = nn.Sequential(nn.Embedding(11, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    queue = split_backward(module, torch.randint(11, (3, 5)), torch.randn(3, 5, WIDTH))
    assert len(queue) == 3
    assert not gradients(module)
    queue.run()
    assert len(queue) == 0
    assert len(gradients(module)) == 5


def test_without_a_queue_a_prepared_module_has_a_fused_backward() -> None:
    module = nn.Linear(WIDTH, WIDTH)
    recorder = defer_weight_gradients(module)
    module(torch.randn(2, WIDTH)).sum().backward()
    assert module.weight.grad is not None
    with torch.no_grad(), recorder.into(WeightGrads()):
        assert module(torch.randn(2, WIDTH)).grad_fn is None


def test_preparing_keeps_the_state_dict_and_allows_copying() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Embedding(3, WIDTH))
    before = list(module.state_dict())
    recorder = defer_weight_gradients(module)
    assert defer_weight_gradients(module) is recorder  # idempotent
    assert list(module.state_dict()) == before
    assert isinstance(copy.deepcopy(module)[0], nn.Linear)


def test_weight_gradients_carry_no_graph() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    for _ in range(2):
        split_backward(module, torch.randn(2, WIDTH), torch.randn(2, WIDTH)).run()
    for gradient in (p.grad for p in module.parameters()):
        assert gradient is not None
        assert gradient.grad_fn is None
        assert not gradient.requires_grad


def test_w_releases_the_tensors_that_i_kept() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    x = torch.randn(2, WIDTH, requires_grad=True)
    queue = split_backward(module, x, torch.randn(2, WIDTH))
    linears = [grad for grad in queue if isinstance(grad, LinearGrad)]
    held = [weakref.ref(tensor) for grad in linears for tensor in (grad.x, grad.grad_output)]
    del linears
    assert len(held) == 4
    gc.collect()
    assert all(reference() is not None for reference in held)
    queue.run()
    assert all(reference() is None for reference in held)


def test_output_gradients_that_autograd_still_uses_are_not_changed_in_the_queue() -> None:
    """A residual connection passes one gradient tensor to the Linear and, after adding to it, further up."""
    module = Residual()
    prepared = copy.deepcopy(module)
    x, grad_output = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    module(x.clone().requires_grad_()).backward(grad_output.clone())
    split_backward(prepared, x.clone().requires_grad_(), grad_output).run()
    assert_same(gradients(prepared), gradients(module))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("backward", [True, False])
def test_under_autocast_gradients_have_the_dtypes_of_their_parameters_and_equal_autograd(
    forward: bool, backward: bool
) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(11, 32), nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32))
    prepared = copy.deepcopy(module)
    recorder = defer_weight_gradients(prepared)
    words = torch.randint(11, (3, 5))
    queue = WeightGrads()
    with torch.autocast("cpu", torch.bfloat16, enabled=forward):
        expected = module(words)
        with recorder.into(queue):
            output = prepared(words)
    assert output.dtype == expected.dtype
    torch.testing.assert_close(output, expected)
    grad_output = torch.randn_like(output)
    with torch.autocast("cpu", torch.bfloat16, enabled=backward):
        expected.backward(grad_output)
        output.backward(grad_output)
        queue.run()
    for (name, parameter), other in zip(prepared.named_parameters(), module.parameters(), strict=True):
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == torch.float32
        torch.testing.assert_close(parameter.grad, other.grad, rtol=5e-2, atol=5e-2)


def test_module_trees_that_share_a_module_both_queue() -> None:
    shared = nn.Linear(WIDTH, WIDTH)
    one, two = nn.Sequential(shared), nn.Sequential(shared, nn.Linear(WIDTH, WIDTH))
    assert len(split_backward(one, torch.randn(2, WIDTH), torch.randn(2, WIDTH))) == 1
    assert len(split_backward(two, torch.randn(2, WIDTH), torch.randn(2, WIDTH))) == 2
    assert len(split_backward(one, torch.randn(2, WIDTH), torch.randn(2, WIDTH))) == 1


def test_checkpointed_layers_queue_too() -> None:
    module = Checkpointed()
    queue = split_backward(module, torch.randn(3, 5, WIDTH, requires_grad=True), torch.randn(3, 5, WIDTH))
    assert len(queue) == 1
    assert not gradients(module)
