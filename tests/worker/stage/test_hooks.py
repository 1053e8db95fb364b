"""Parameters with hooks are left to autograd; cases that W cannot compute are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
from support.functions import Function
from support.gradients import gradients_of, relative_error, require_equal, split
from support.stages import forth_and_back
from torch import Tensor, nn
from torch.autograd import forward_ad
from zbv_worker.errors import ModelError
from zbv_worker.stage.recorder import defer_weight_gradients
from zbv_worker.stage.stage import Stage
from zbv_worker.stage.weight_grads import WeightGrads

WIDTH = 6


def bent(gradient: Tensor) -> Tensor:
    """Not linear: the results for the parts of a gradient do not sum to the result for the whole."""
    return gradient.clamp(-0.02, 0.01)


def test_a_parameter_is_not_queued_while_it_has_a_hook_and_the_others_are() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    first = module.get_parameter("0.weight").register_hook(bent)  # type: ignore[no-untyped-call]
    module.get_parameter("1.bias").register_post_accumulate_grad_hook(lambda _: None)  # type: ignore[no-untyped-call]
    queue = split(module, torch.randn(2, WIDTH), torch.randn(2, WIDTH))
    assert queue.parameters() == set(module[2].parameters())
    assert set(gradients_of([module])) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    first.remove()
    queue = split(module, torch.randn(2, WIDTH), torch.randn(2, WIDTH))
    assert queue.parameters() == {*module[0].parameters(), *module[2].parameters()}


def test_live_graphs_are_not_mistaken_for_hooks() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    queue = WeightGrads()
    with defer_weight_gradients(module).into(queue):
        outputs = [module(torch.randn(2, WIDTH)) for _ in range(3)]
        kept = module.get_parameter("0.weight") * 2
        outputs.append(module(torch.randn(2, WIDTH)))
        for output in outputs:
            output.sum().backward()
    assert len(queue) == 8
    assert kept.requires_grad


def test_a_hook_added_after_f_is_called_by_w() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    calls: list[Tensor] = []

    def before(gradient: Tensor) -> Tensor:
        calls.append(gradient)
        return gradient * 3

    queue = split(module, torch.randn(2, WIDTH), torch.randn(2, WIDTH))
    module.get_parameter("0.weight").register_hook(before)  # type: ignore[no-untyped-call]
    module.get_parameter("0.bias").register_post_accumulate_grad_hook(calls.append)  # type: ignore[no-untyped-call]
    queue.run()
    assert len(calls) == 2
    torch.testing.assert_close(module.get_parameter("0.weight").grad, calls[0] * 3)
    assert calls[1] is module.get_parameter("0.bias")


class Delayed(nn.Linear):
    """A Linear as TransformerEngine builds it with ``delay_wgrad_compute``."""

    def need_backward_dw(self) -> bool:
        return True


class InParallel(nn.parallel.DistributedDataParallel):
    """One without processes."""

    def __init__(self) -> None:
        nn.Module.__init__(self)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (InParallel(), "found a DistributedDataParallel in a stage"),
        (Delayed(WIDTH, WIDTH), r"found a Delayed .* only in backward_dw\(\)"),
        (nn.LazyLinear(WIDTH), "found a LazyLinear whose parameters have no shapes yet"),
    ],
)
def test_modules_whose_weight_gradients_w_cannot_compute_are_refused(module: nn.Module, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        defer_weight_gradients(nn.Sequential(nn.Linear(WIDTH, WIDTH), module))


def test_hooks_on_shared_parameters_of_a_recomputed_stage_are_refused() -> None:
    one, two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    two.weight = one.weight
    module = nn.Sequential(one, two)
    stage = Stage(0, 2, module, microbatches=1, layers=tuple(module), is_recomputed=True)
    stage.forward(0, torch.randn(2, WIDTH), split=True)
    one.weight.register_hook(bent)  # type: ignore[no-untyped-call]
    with pytest.raises(ModelError, match="a parameter that several layers share has hooks"):
        stage.forward(1, torch.randn(2, WIDTH), split=True)


# Gradients within the forward, and gradients of gradients


def force(*, create_graph: bool) -> nn.Module:
    """Returns the gradient of an energy with respect to its input, as models of molecules do."""

    def compute(self: Any, x: Tensor) -> Any:
        x = x.detach().requires_grad_()
        return self.last(*torch.autograd.grad(self.energy(x).square().sum(), x, create_graph=create_graph))

    return Function(compute, energy=nn.Linear(WIDTH, WIDTH), last=nn.Linear(WIDTH, WIDTH))


def test_gradients_requested_in_the_forward_are_not_queued() -> None:
    """Under autograd they do not reach the weights that they pass through."""
    module = force(create_graph=False)
    prepared = copy.deepcopy(module)
    x, gradient = torch.randn(3, WIDTH), torch.randn(3, WIDTH)
    module(x).backward(gradient)
    split(prepared, x, gradient).run()
    assert set(gradients_of([module])) == {"last.weight", "last.bias"}
    require_equal(prepared, module)


def test_gradients_of_gradients_through_a_split_module_are_refused() -> None:
    x, gradient = torch.randn(3, WIDTH), torch.randn(3, WIDTH)
    said = "create_graph=True through a module whose weight gradient W computes"
    with pytest.raises(ModelError, match=said):
        split(force(create_graph=True), x, gradient)
    # B is autograd's own backward, which can.
    module = force(create_graph=True)
    fused = copy.deepcopy(module)
    module(x).backward(gradient)
    forth_and_back(Stage(0, 2, fused, microbatches=1), x, gradient, split=False)
    require_equal(fused, module)


def test_a_backward_with_create_graph_is_refused_and_queues_nothing() -> None:
    for module, x in (
        (nn.Linear(WIDTH, WIDTH), torch.randn(2, WIDTH, requires_grad=True)),
        (nn.Embedding(5, WIDTH), torch.randint(5, (2,))),
    ):
        queue = WeightGrads()
        tree = nn.Sequential(module)
        with defer_weight_gradients(tree).into(queue), pytest.raises(ModelError, match="create_graph=True"):
            tree(x).sum().backward(create_graph=True)
        assert len(queue) == 0


class ByHand(torch.autograd.Function):
    """Activation checkpointing as in guided diffusion: its backward asks for the gradients of parameters."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor, *_: Tensor) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            output: Tensor = module(x)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        x = x.detach()
        wanted = [*([x.requires_grad_()] if x.is_floating_point() else []), *ctx.module.parameters()]
        with torch.enable_grad():
            output = ctx.module(x)
        found = torch.autograd.grad(output, wanted, gradients[0])
        return (None, *found) if x.is_floating_point() else (None, None, *found)


def checkpointed(self: Any, x: Tensor) -> Any:
    return ByHand.apply(self.inner, x, *self.inner.parameters())  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    "inner",
    [
        nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, WIDTH, bias=False)),
        nn.Linear(WIDTH, WIDTH).bfloat16(),
        nn.Sequential(nn.Embedding(5, WIDTH, padding_idx=-1), nn.Linear(WIDTH, WIDTH)),
    ],
)
def test_the_gradients_of_weights_that_a_function_asks_for_are_computed_at_once(inner: nn.Module) -> None:
    module = Function(checkpointed, inner=inner)
    prepared = copy.deepcopy(module)
    parameter = next(inner.parameters())
    x = torch.randint(5, (3,)) if parameter.shape[0] == 5 else torch.randn(3, WIDTH).to(parameter.dtype)
    gradient = torch.randn(3, WIDTH).to(parameter.dtype)
    module(x).backward(gradient)
    assert not split(prepared, x, gradient)
    require_equal(prepared, module)


@pytest.mark.parametrize("which", ["weight", "bias"])
def test_the_gradient_of_a_queued_weight_may_be_asked_for(which: str) -> None:
    module, queue = nn.Linear(WIDTH, WIDTH), WeightGrads()
    x = torch.randn(2, WIDTH)
    (expected,) = torch.autograd.grad(module(x).cos().sum(), module.get_parameter(which))
    with defer_weight_gradients(module).into(queue):
        (found,) = torch.autograd.grad(module(x).cos().sum(), module.get_parameter(which))
    torch.testing.assert_close(found, expected)
    assert not queue


@pytest.mark.filterwarnings("ignore:`torch.jit.*deprecated:DeprecationWarning")  # torch's own
def test_functional_transforms_go_through_a_prepared_module() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    x = torch.randn(4, WIDTH)
    expected = torch.vmap(module)(x)
    with defer_weight_gradients(module).into(WeightGrads()):
        torch.testing.assert_close(torch.vmap(module)(x), expected)
        with forward_ad.dual_level():
            output = module(forward_ad.make_dual(x, torch.ones_like(x)))  # type: ignore[no-untyped-call]
            tangent = forward_ad.unpack_dual(output).tangent  # type: ignore[no-untyped-call]
    torch.testing.assert_close(tangent, torch.ones_like(x) @ module.get_parameter("0.weight").t())


# Weights that are used more than once


class Tied(nn.Module):
    """An embedding and a head with one weight, in one stage; ``direct`` adds a direct use of the weight."""

    def __init__(self, direct: bool, *, sparse: bool = False):
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH, sparse=sparse)
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.embedding.weight
        self._direct = direct

    def forward(self, words: Tensor) -> Tensor:
        hidden = torch.tanh(self.middle(self.embedding(words)))
        output: Tensor = self.head(hidden)
        return output + nnf.linear(hidden, self.head.weight) if self._direct else output


def twice(first: str) -> nn.Module:
    """One weight, used through its Linear and directly, in either order."""

    def compute(self: Any, x: Tensor) -> Any:
        direct = partial(nnf.linear, weight=self.linear.weight, bias=self.linear.bias)
        one, two = (self.linear, direct) if first == "module" else (direct, self.linear)
        return two(torch.tanh(one(x)))

    return Function(compute, linear=nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize(
    "make",
    [
        *(partial(Tied, False), partial(Tied, True), partial(Tied, False, sparse=True)),
        *(partial(twice, "module"), partial(twice, "direct")),
    ],
)
def test_a_weight_that_is_used_twice_gets_its_whole_gradient(
    make: Callable[[], nn.Module], autocast: torch.dtype | None
) -> None:
    """Autocast caches casts of parameters: a cast without a graph would lose the gradient of a later use."""
    torch.manual_seed(0)
    module = make()
    prepared = copy.deepcopy(module)
    recorder = defer_weight_gradients(prepared)
    x = torch.randint(7, (5,)) if isinstance(module, Tied) else torch.randn(5, WIDTH)
    for _ in range(2):
        queue = WeightGrads()
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            expected = module(x)
            with recorder.into(queue):
                output = prepared(x)
        gradient = torch.randn_like(output)
        expected.backward(gradient)
        output.backward(gradient)
        queue.run()
    error = relative_error(gradients_of([prepared]), gradients_of([module]))
    assert error < (1e-5 if autocast is None else 2e-2)
