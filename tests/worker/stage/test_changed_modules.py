"""Users may change prepared modules; these have autograd's gradients, and are ordinary modules in the end."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.functions import Function
from support.gradients import gradients
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from zbv_worker.errors import ModelError
from zbv_worker.stage.recorder import defer_weight_gradients, stop_deferring
from zbv_worker.stage.stage import Stage
from zbv_worker.stage.weight_grads import WeightGrads

WIDTH = 6


def lora() -> nn.Module:
    """Adds a product of two small matrices to a weight."""
    down, up = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.randn(WIDTH, 2))
    return Function(lambda self, weight: weight + self.up @ self.down, down=down, up=up)


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def old_weight_norm(layer: nn.Linear) -> None:
    with warnings.catch_warnings(action="ignore"):  # torch calls it deprecated
        torch.nn.utils.weight_norm(layer)


def wrap_forward(layer: Any) -> None:
    """As libraries do that place hooks around a module's forward."""
    before = layer.forward
    layer.forward = lambda x: before(x) * 2


def compile_forward(layer: Any) -> None:
    layer.forward = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)


def of_own_class(layer: Any) -> None:
    layer.__class__ = Doubled


def of_derived_class(layer: Any) -> None:
    class Derived(type(layer)):  # type: ignore[misc]
        def forward(self, input: Tensor) -> Any:
            return super().forward(input) * 2

    layer.__class__ = Derived


class Mixin:
    """Multiplies what the next class computes."""

    def forward(self: Any, input: Tensor) -> Any:
        return super().forward(input) * 2  # type: ignore[misc]


def of_mixed_class(layer: Any) -> None:
    layer.__class__ = type("Mixed", (Mixin, type(layer)), {})


CHANGES: dict[str, Callable[[Any], object]] = {
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "LoRA": lambda layer: parametrize.register_parametrization(layer, "weight", lora()),
    "twice": lambda layer: [
        parametrize.register_parametrization(layer, name, nn.Tanh()) for name in ("weight", "bias")
    ],
    "old weight norm": old_weight_norm,
    "pruned": lambda layer: prune.random_unstructured(layer, "weight", 0.5),  # type: ignore[no-untyped-call]
    "own class": of_own_class,
    "derived class": of_derived_class,
    "mixed class": of_mixed_class,
    "wrapped forward": wrap_forward,
    "compiled forward": compile_forward,
    "another weight": lambda layer: setattr(layer, "weight", nn.Parameter(torch.randn(WIDTH, WIDTH))),
}
PARAMETRIZED = ("weight norm", "spectral norm", "orthogonal", "LoRA")


def pair() -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    return module, copy.deepcopy(module)


def apply(change: Callable[[Any], object], *modules: nn.Sequential) -> None:
    for module in modules:
        torch.manual_seed(1)
        change(module[0])


def require_equal_training(prepared: nn.Module, module: nn.Module, queue: WeightGrads | None) -> None:
    x = torch.randn(3, WIDTH)
    theirs, mine = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = module(theirs)
    with defer_weight_gradients(prepared).into(queue):
        output = prepared(mine)
    torch.testing.assert_close(output, expected)
    expected.square().sum().backward()
    output.square().sum().backward()
    if queue is not None:
        queue.run()
    torch.testing.assert_close(mine.grad, theirs.grad)
    torch.testing.assert_close(gradients(prepared), gradients(module))


def require_ordinary(layer: nn.Module, plain: nn.Module) -> None:
    kinds = [[(kind.__module__, kind.__qualname__) for kind in type(it).__mro__] for it in (layer, plain)]
    assert kinds[0] == kinds[1]
    assert vars(layer).keys() == vars(plain).keys()
    x = torch.randn(2, WIDTH)
    torch.testing.assert_close(layer(x), plain(x))


@pytest.mark.parametrize("is_used_before", [True, False])
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_module_has_autograds_gradients_and_ends_ordinary(name: str, is_used_before: bool) -> None:
    module, prepared = pair()
    defer_weight_gradients(prepared)
    if is_used_before:
        require_equal_training(prepared, module, WeightGrads())
        module.zero_grad()
        prepared.zero_grad()
    apply(CHANGES[name], module, prepared)
    for queue in (WeightGrads(), None):
        require_equal_training(prepared, module, queue)
    stop_deferring(prepared)
    for layer, plain in zip(prepared.eval(), module.eval(), strict=True):
        require_ordinary(layer, plain)


@pytest.mark.parametrize("leave", [True, False])
@pytest.mark.parametrize("stops_first", [True, False])
@pytest.mark.parametrize("name", PARAMETRIZED)
def test_a_parametrization_may_be_removed_at_any_time(name: str, stops_first: bool, leave: bool) -> None:
    module, prepared = pair()
    defer_weight_gradients(prepared)
    apply(CHANGES[name], module, prepared)
    leave = leave or name == "weight norm"  # which torch cannot undo otherwise

    def remove() -> None:
        for it in (module, prepared):
            parametrize.remove_parametrizations(it[0], "weight", leave_parametrized=leave)

    if stops_first:
        stop_deferring(prepared)
        remove()
    else:
        remove()
        require_equal_training(prepared, module, WeightGrads())
        stop_deferring(prepared)
    assert type(prepared[0]) is nn.Linear
    require_ordinary(prepared[0], module[0])


def test_modules_that_left_the_tree_are_ordinary_afterwards() -> None:
    module, prepared = pair()
    defer_weight_gradients(prepared)
    old = prepared[0]
    for it in (module, prepared):
        torch.manual_seed(1)
        it[0] = nn.Sequential(it[0], nn.Linear(WIDTH, WIDTH))
        it[1] = nn.Linear(WIDTH, WIDTH)
    require_equal_training(prepared, module, WeightGrads())
    prepared[0] = nn.Identity()
    stop_deferring(prepared)
    assert type(old) is nn.Linear
    assert "recorder" not in vars(old)


@pytest.mark.parametrize("protocol", [0, 2, pickle.HIGHEST_PROTOCOL])
def test_copies_and_saved_modules_are_ordinary(protocol: int) -> None:
    layers = [nn.Linear(WIDTH, WIDTH), nn.Embedding(5, WIDTH, padding_idx=1)]
    module = nn.Sequential(*layers)
    defer_weight_gradients(module)
    with io.BytesIO() as file:
        torch.save(module, file, pickle_protocol=max(2, protocol))
        file.seek(0)
        saved = torch.load(file, weights_only=False)
    for other in (
        copy.deepcopy(module),
        nn.Sequential(*map(copy.copy, module)),
        pickle.loads(pickle.dumps(module, protocol)),
        saved,
    ):
        assert [type(layer) for layer in other] == [nn.Linear, nn.Embedding]
        assert not {"recorder", "is_tapped"} & (vars(other[0]).keys() | vars(other[1]).keys())
        torch.testing.assert_close(other.state_dict(), module.state_dict())
    assert repr(module) == repr(copy.deepcopy(module))


def test_a_copy_of_a_parametrized_module_works_by_itself() -> None:
    module, prepared = pair()
    defer_weight_gradients(prepared)
    apply(parametrizations.weight_norm, module, prepared)
    other = copy.deepcopy(prepared)
    stop_deferring(prepared)
    require_equal_training(other, module, None)


def test_attributes_of_users_stay() -> None:
    layer: Any = nn.Identity()
    layer.recorder = layer.is_tapped = own = object()
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), layer)
    defer_weight_gradients(module)
    stop_deferring(module)
    assert layer.recorder is layer.is_tapped is own


def test_scripted_modules_are_left_alone() -> None:
    with warnings.catch_warnings(action="ignore"):  # torch calls it deprecated
        module = nn.Sequential(torch.jit.script(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH))
    kinds = [type(layer) for layer in module]
    defer_weight_gradients(module)
    stop_deferring(module)
    assert [type(layer) for layer in module] == kinds


@pytest.mark.parametrize("module", [nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)])
def test_a_stages_module_is_ordinary_afterwards(module: nn.Module) -> None:
    kinds = [type(it) for it in module.modules()]
    Stage(0, 2, module, microbatches=1)
    stop_deferring(module)
    assert [type(it) for it in module.modules()] == kinds


@pytest.mark.parametrize("which", ["weight", "bias"])
@pytest.mark.parametrize("before", [True, False])
def test_requires_grad_may_change_between_f_and_i(which: str, before: bool) -> None:
    """The graph of F decides, and a parameter that is frozen now gets nothing."""
    module, prepared = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    prepared.load_state_dict(module.state_dict())
    x, queue = torch.randn(2, WIDTH), WeightGrads()
    for layer in (module, prepared):
        getattr(layer, which).requires_grad_(before)
    with defer_weight_gradients(prepared).into(queue):
        output = prepared(x)
    expected = module(x)
    for layer in (module, prepared):
        getattr(layer, which).requires_grad_(not before)
    expected.sum().backward()
    output.sum().backward()
    queue.run()
    torch.testing.assert_close(gradients(prepared), gradients(module))


@pytest.mark.parametrize("operand", ["input", "gradient"])
def test_w_refuses_operands_that_were_written_to_after_i(operand: str) -> None:
    """With B the write would come too late to matter; nobody may train with what it left."""
    module, queue = nn.Linear(WIDTH, WIDTH), WeightGrads()
    table, gradient = torch.randn(2, WIDTH), torch.randn(2, WIDTH)
    with defer_weight_gradients(module).into(queue):
        module(table).backward(gradient)
    (table if operand == "input" else gradient).mul_(2)
    with pytest.raises(ModelError, match="was written to before W"):
        queue.run()
