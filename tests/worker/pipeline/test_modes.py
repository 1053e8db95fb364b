"""What the user set on layers stays set: modes, frozen parameters, buffers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import zbv_worker as zbv
from support.gradients import train_plainly
from torch import nn
from torch.nn import functional as nnf
from zbv_solver.plans.plan import Plan
from zbv_worker.model.layer_list import stacked


def layer() -> nn.Sequential:
    """Everything that has a mode is in evaluation mode, although the layer is not; the norm is frozen."""
    norm = nn.BatchNorm1d(4)
    nn.init.constant_(norm.get_buffer("running_mean"), 0.5)
    return nn.Sequential(nn.Linear(4, 4), norm.eval().requires_grad_(False), nn.Dropout(0.9).eval())


def layers() -> list[nn.Sequential]:
    torch.manual_seed(1)
    return [layer() for _ in range(3)]


class Kept:
    """Builds the same modules each time."""

    def __init__(self, modules: Sequence[nn.Module]):
        self.modules = dict(zip("abc", modules, strict=True))

    def layer_names(self) -> tuple[str, ...]:
        return tuple(self.modules)

    def build_layers(self, names: Sequence[str], device: torch.device) -> nn.Sequential:
        return stacked({name: self.modules[name].to(device) for name in names})


def given(form: str) -> tuple[Any, list[Any]]:
    """Layers, and the unsplit model."""
    if form == "functions":
        torch.manual_seed(5)
        return [layer] * 3, []
    made = layers()
    return (Kept(made) if form == "object" else made), copy.deepcopy(made)


@pytest.mark.parametrize("form", ["modules", "object", "functions"])
def test_modules_in_evaluation_mode_train_in_that_mode(form: str, plan: Plan) -> None:
    own, whole = given(form)
    x = torch.randn(4, 4)
    with zbv.Pipeline(plan, own, nnf.mse_loss) as pipe:
        if form == "functions":
            whole = copy.deepcopy([each for stage in pipe.modules.values() for each in stage.children()])
        for _ in range(2):
            loss = pipe.step(x, x)
            torch.testing.assert_close(loss, nnf.mse_loss(nn.Sequential(*whole)(x), x).detach())
            pipe.evaluate(x, x)
        layers = [each for stage in pipe.modules.values() for each in stage.children()]
        modes = [module.training for each in layers for module in each.modules()]
        assert modes == [module.training for each in whole for module in each.modules()]
        for name, buffer in pipe.state_dict().items():
            if "num_batches" in name:
                assert buffer == 0


def test_modes_may_change_between_steps(plan: Plan) -> None:
    own = layers()
    whole = nn.Sequential(*copy.deepcopy(own))
    x = torch.randn(4, 4)
    with zbv.Pipeline(plan, own, nnf.mse_loss) as pipe:
        for each in (*own, *whole):
            each[1].train()
        pipe.step(x, x)
        for part in x.chunk(2):
            whole(part)
        for each in (*own, *whole):
            each[1].eval()
        torch.testing.assert_close(pipe.step(x, x), nnf.mse_loss(whole(x), x).detach())


class Merging(nn.Linear):
    """Adds its adapter to the weight for evaluations, as loralib does."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.adapter, self.is_merged = nn.Parameter(torch.randn(4, 4)), False

    def train(self, mode: bool = True) -> Merging:
        if self.is_merged == mode:
            self.weight.data += -self.adapter.data if mode else self.adapter.data
            self.is_merged = not mode
        return super().train(mode)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = super().forward(input)
        return output if self.is_merged else output + input @ self.adapter.T


def test_modules_that_change_themselves_for_an_evaluation_train_as_before(plan: Plan) -> None:
    torch.manual_seed(1)
    own: list[nn.Module] = [nn.Sequential(Merging()), Merging().eval(), Merging()]
    whole = nn.Sequential(*copy.deepcopy(own))
    x = torch.randn(4, 4)
    loss = train_plainly(whole, nnf.mse_loss, (x, x))
    with zbv.Pipeline(plan, own, nnf.mse_loss) as pipe:
        torch.testing.assert_close(pipe.evaluate(x, x), loss)
        pipe.step(x, x)
    for mine, expected in zip(nn.Sequential(*own).parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close((mine, mine.grad), (expected, expected.grad))


@pytest.mark.parametrize("form", ["modules", "object"])
def test_planning_layers_changes_nothing_of_them(form: str) -> None:
    own, whole = given(form)
    modules: Sequence[Any] = list(own.modules.values()) if isinstance(own, Kept) else own
    for each in (*modules, *whole):
        each[1].train()
    x, state = torch.randn(4, 4), torch.get_rng_state()
    with zbv.Pipeline(None, own, nnf.mse_loss, microbatches=2, example=(x, x)):
        assert torch.equal(state, torch.get_rng_state())
        for module, untouched in zip(modules, whole, strict=True):
            torch.testing.assert_close(module.state_dict(), untouched.state_dict(), rtol=0, atol=0)
            modes, frozen = (
                [[each.training for each in it.modules()] for it in (module, untouched)],
                [[p.requires_grad for p in it.parameters()] for it in (module, untouched)],
            )
            assert (modes[0], frozen[0]) == (modes[1], frozen[1])
            assert all(parameter.grad is None for parameter in module.parameters())
