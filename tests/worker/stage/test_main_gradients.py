"""Parameters in half precision sum their gradients in float32, in every plan, and memory includes that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

import pytest
import torch
import torch.nn.functional as nnf
from support.gradients import relative_error
from support.plans import unit_problem
from support.selfcheck import random_orders
from support.stages import forth_and_back
from support.thread_transport import ThreadHub
from support.trained import Remembering, Trained, train_in_threads
from torch import Tensor, nn
from zbv_solver.problem.problem import Problem
from zbv_worker.errors import ModelError
from zbv_worker.gradients.buckets import SummedGradients
from zbv_worker.gradients.gradients import Gradients
from zbv_worker.measure.estimate.estimate import estimate_layers
from zbv_worker.measure.stage_memory import static_bytes
from zbv_worker.run.options import TrainingOptions
from zbv_worker.stage.main_gradients import use_main_gradients
from zbv_worker.stage.stage import Stage
from zbv_worker.stage.weight_grads import gradient_of

CPU = torch.device("cpu")
MICROBATCHES = 64
BFLOAT16 = 2.0**-8
"""The largest relative error of rounding to bfloat16, twice."""


class Half(Remembering):
    """Four layers in bfloat16; with similar microbatches, a sum in bfloat16 loses the later gradients."""

    def layer_names(self) -> Sequence[str]:
        return [f"layer{at}" for at in range(4)]

    def made(self, at: int) -> nn.Module:
        # A norm's gradient comes from autograd, a Linear's from W.
        return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh())

    def _layer(self, at: int) -> nn.Module:
        return super()._layer(at).bfloat16()

    def microbatch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        noise = torch.Generator().manual_seed(1000 * step + index)
        x = torch.randn(16, 8, generator=generator) + 0.1 * torch.randn(16, 8, generator=noise)
        return x.bfloat16(), x.roll(1, dims=1).bfloat16()

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nnf.mse_loss(output.float(), target.float())

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return Noting(parameters)


class Noting(torch.optim.SGD):
    """Changes no parameter and records the gradients."""

    def __init__(self, parameters: Iterable[nn.Parameter]):
        super().__init__(parameters, lr=0.0)

    def step(self, closure: object = None) -> None:  # type: ignore[override]  # no loss
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.given = parameter.grad.clone()


def trained(problem: Problem, options: TrainingOptions, fused: float) -> tuple[Trained, dict[str, Tensor]]:
    """One step of a random plan, and the gradients that the optimizers got."""
    models: list[Half] = []

    def make() -> Half:
        models.append(Half())
        return models[-1]

    found = train_in_threads(problem, random_orders(problem, Random(1), fused), options, 1, model=make)
    modules = [module for model in models for module in model.built]
    named = [each for module in modules for each in module.named_parameters()]
    given: dict[str, Tensor] = {name: parameter.given for name, parameter in named}  # type: ignore[attr-defined]
    assert all(gradient.dtype == torch.bfloat16 for gradient in given.values())
    return found, {name: gradient.float() for name, gradient in given.items()}


def alone(microbatches: int, *, in_float32: bool) -> dict[str, Tensor]:
    """The mean gradient by plain autograd, summed in float32 or, as autograd does, in bfloat16."""
    model = Half()
    module = model.build_stage(0, 1, CPU)
    total: dict[str, Tensor] = {}
    for index in range(microbatches):
        x, y = model.microbatch(0, index)
        loss = model.loss(module(x), y) / microbatches
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        if in_float32:
            for name, parameter in module.named_parameters():
                assert parameter.grad is not None
                total[name] = total.get(name, torch.zeros(())) + parameter.grad.float()
            module.zero_grad()
    if in_float32:
        return total
    return {name: p.grad.float() for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("replicas", "fused"), [(1, 0.5), (2, 0.3)])
def test_gradients_of_64_microbatches_are_summed_in_float32(replicas: int, fused: float) -> None:
    problem, right = unit_problem(2, MICROBATCHES // replicas), alone(MICROBATCHES, in_float32=True)
    _, gradients = trained(problem, TrainingOptions(replicas=replicas), fused)
    assert relative_error(gradients, right) < BFLOAT16
    # What is avoided is real: in bfloat16 the sum is worse.
    assert relative_error(alone(MICROBATCHES, in_float32=False), right) > 2 * BFLOAT16


def test_clipping_uses_the_float32_gradients() -> None:
    found, gradients = trained(unit_problem(2, 4), TrainingOptions(clip_norm=0.01), 0.3)
    right = alone(4, in_float32=True)
    norm = float(torch.stack([gradient.norm() for gradient in right.values()]).norm())
    assert found.reports[0].lines[0].updated.gradient_norm == pytest.approx(norm, rel=0.01)
    clipped = {name: gradient * 0.01 / norm for name, gradient in right.items()}
    assert relative_error(gradients, clipped) < 3 * BFLOAT16


def stage_of(module: nn.Module) -> Stage:
    return Stage(0, 2, module, microbatches=1)


def test_only_main_gradients_live_between_actions_and_the_optimizer_frees_them() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).bfloat16()
    gradients, stage = Gradients({0: module}), stage_of(module)
    gradients.begin()
    for split in (True, False):
        forth_and_back(stage, *torch.randn(2, 4, 8).bfloat16(), split=split)
        for parameter in module.parameters():
            assert parameter.grad is None
            assert gradient_of(parameter).dtype == torch.float32  # type: ignore[union-attr]
    gradients.hand_over()
    for parameter in module.parameters():
        assert parameter.grad is not None
        assert parameter.main_grad is None  # type: ignore[attr-defined]


def test_estimate_and_profile_count_four_bytes_for_the_gradient_of_a_half_parameter() -> None:
    count = sum(p.numel() for p in Half().build_layers(["layer1"], CPU).parameters())
    estimates = list(estimate_layers(Half()))
    assert [each.static.gradients for each in estimates] == [4 * count] * 4
    assert [each.static.parameters for each in estimates] == [2 * count] * 4
    module = Half().build_layers(["layer1"], CPU)
    stage = stage_of(module)
    use_main_gradients(module.parameters())
    forth_and_back(stage, *torch.randn(2, 4, 8).bfloat16(), split=False)
    for _ in range(2):
        assert static_bytes(Remembering(), {0: stage}, receives=0, workspace=0).gradients == 4 * count


def test_a_post_accumulate_hook_of_the_model_keeps_autograds_accumulation() -> None:
    module = nn.Sequential(nn.Linear(8, 8)).bfloat16()
    gradients, stage = Gradients({0: module}), stage_of(module)
    gradients.begin()
    seen: list[Tensor] = []

    def look(parameter: Tensor) -> None:
        assert parameter.grad is not None
        seen.append(parameter.grad.clone())

    module.get_parameter("0.weight").register_post_accumulate_grad_hook(look)  # type: ignore[no-untyped-call]
    gradients.begin()  # as before every step
    for _ in range(2):
        forth_and_back(stage, *torch.randn(2, 4, 8).bfloat16())
    gradients.hand_over()
    assert len(seen) == 2
    torch.testing.assert_close(module.get_parameter("0.weight").grad, seen[1])
    assert module.get_parameter("0.bias").grad is not None


def test_a_hook_that_replaces_a_summed_gradient_is_refused() -> None:
    module = nn.Sequential(nn.Linear(4, 4))
    gradients = SummedGradients({0: module}, ThreadHub(1).transport(0))

    def take(parameter: Tensor) -> None:
        parameter.grad = None

    module.get_parameter("0.weight").register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
    gradients.begin()
    module(torch.randn(2, 4)).sum().backward()
    with pytest.raises(ModelError, match=r"shape \[4, 4\] was replaced during the step"):
        gradients.stage_done(0)
