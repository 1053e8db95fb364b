"""Losses with parameters, and losses without a graph, compared with plain autograd."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import zbv_worker as zbv
from support.gradients import gradients, train_plainly
from support.plans import searched, unit_problem
from support.small_pipeline import NAMES, WIDTH, batch, model, planned
from torch import Tensor, nn
from torch.nn import functional as nnf
from zbv_solver.plans.plan import Plan

Loss = Callable[[Any, Any], Any]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned("v")


class Margin(nn.Module):
    """A temperature, a frozen scale and an adapter; the mean, or the pair of sum and number."""

    def __init__(self, *, is_pair: bool = True):
        super().__init__()
        torch.manual_seed(5)
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.frozen = nn.Parameter(torch.tensor(1.5), requires_grad=False)
        self.adapter = nn.Linear(WIDTH, WIDTH)
        self.is_pair = is_pair

    def forward(self, output: Tensor, target: Tensor) -> Any:
        error = (self.temperature * self.frozen * self.adapter(output) - target).square()
        return (error.sum(), torch.tensor(float(error.numel()))) if self.is_pair else error.mean()

    def named_differently(self, output: Tensor, target: Tensor) -> Any:
        return self(output, target)


class Caller:
    """A callable that is no module, and has one."""

    def __init__(self, margin: Margin):
        self.margin = margin

    def __call__(self, output: Tensor, target: Tensor) -> Any:
        return self.margin(output, target)

    def method(self, output: Tensor, target: Tensor) -> Any:
        return self.margin(output, target)


def called_with(output: Tensor, target: Tensor, margin: Margin) -> Any:
    return margin(output, target)


def around(margin: Margin) -> Loss:
    return lambda output, target: margin(output, target)


def by_default(margin: Margin) -> Loss:
    def loss(output: Tensor, target: Tensor, *, criterion: Margin = margin) -> Any:
        return criterion(output, target)

    return loss


FORMS: dict[str, tuple[Callable[[Margin], Loss], str]] = {
    "module": (lambda margin: margin, ""),
    "method of a module": (lambda margin: margin.named_differently, ""),
    "partial": (lambda margin: partial(called_with, margin=margin), "margin."),
    "partial of a module": (lambda margin: partial(margin), ""),
    "callable object": (Caller, "margin."),
    "method of an object": (lambda margin: Caller(margin).method, "margin."),
    "closure": (around, "margin."),
    "default": (by_default, "criterion."),
    "partial of a closure": (lambda margin: partial(around(margin)), "margin."),
}


def expected(loss: nn.Module, times: int, prefix: str = "") -> dict[str, Tensor | None]:
    """Those of plain autograd, by the names of a pipeline."""
    layers = model()
    train_plainly(layers, loss, *[batch()] * times)
    return gradients(layers) | {f"loss.{prefix}{name}": each for name, each in gradients(loss).items()}


PLANS = ("v", "single", "recomputed")


@pytest.mark.parametrize(
    ("form", "of_plan", "is_pair"),
    [(form, PLANS[at % 3], at % 2 == 0) for at, form in enumerate([*FORMS, "module", "closure", "closure"])],
)
def test_parameters_of_a_loss_are_trained_like_a_layers(form: str, of_plan: str, *, is_pair: bool) -> None:
    make, prefix = FORMS[form]
    with zbv.Pipeline(planned(of_plan), model(), make(Margin(is_pair=is_pair))) as pipe:
        for _ in range(2):
            pipe.step(*batch())
        torch.testing.assert_close(gradients(pipe), expected(Margin(), 2, prefix), rtol=1e-4, atol=1e-6)
        assert set(pipe.state_dict()) == set(gradients(pipe))


def test_the_loss_is_none_of_the_layers_of_the_last_stage(plan: Plan) -> None:
    with zbv.Pipeline(plan, model(), Margin()) as pipe:
        last = pipe.modules[max(pipe.modules)]
        assert isinstance(last, nn.Sequential)
        assert all(isinstance(layer, nn.Linear) for layer in last)
        assert len(last) == len([*last])
        part: Any = last[:1]
        assert len(part) == 1


def test_half_precision_and_frozen_losses(plan: Plan) -> None:
    """The gradient of a frozen temperature is None; half precision is summed in float32."""
    margin = Margin()
    margin.temperature.requires_grad_(False)
    exact: Any = expected(copy.deepcopy(margin), 3)
    with zbv.Pipeline(plan, model(), margin, precision="bfloat16") as pipe:
        margin.adapter.bfloat16()
        for _ in range(3):
            pipe.step(*batch())
        found: Any = gradients(pipe)
    assert found["loss.temperature"] is exact["loss.temperature"] is None
    for name in ("loss.adapter.weight", "loss.adapter.bias"):
        torch.testing.assert_close(found[name].float(), exact[name], rtol=0.05, atol=0.05)


class Normalised(nn.Module):
    """A loss with running statistics and a mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)
        self.modes: list[bool] = []

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.modes.append(self.training)
        return nnf.mse_loss(self.norm(output), target)


def test_buffers_and_modes_of_a_loss(plan: Plan) -> None:
    inputs, targets = batch()
    reference, plain = model(), Normalised()
    for part, target in zip(inputs.chunk(4), targets.chunk(4), strict=True):
        plain(reference(part), target)
    loss = Normalised()
    with zbv.Pipeline(plan, model(), loss) as pipe:
        pipe.step(inputs, targets)
        torch.testing.assert_close(pipe.state_dict()["loss.norm.running_mean"], plain.norm.running_mean)
        pipe.evaluate(inputs, targets)
        assert loss.modes == [True] * 4 + [False] * 4
        torch.testing.assert_close(loss.norm.running_mean, plain.norm.running_mean)
        state: Any = pipe.full_state_dict()
        loss.norm.reset_running_stats()
        pipe.load_state_dict(state)
        torch.testing.assert_close(loss.norm.running_mean, plain.norm.running_mean)


def test_checkpoints_have_the_loss(plan: Plan, tmp_path: Path) -> None:
    def run(steps: int, folder: str) -> dict[str, Tensor]:
        with zbv.Pipeline(plan, model(), Margin()) as pipe:
            optimizer = torch.optim.AdamW(pipe.named_parameters(), lr=0.1)
            checkpoints = pipe.checkpoints(tmp_path / folder, optimizer)
            for step in checkpoints.steps(steps, every=1):
                pipe.step(*batch(step))
                optimizer.step()
                optimizer.zero_grad()
            return {name: value.clone() for name, value in pipe.state_dict().items()}

    through = run(4, "through")
    run(2, "resumed")
    torch.testing.assert_close(run(4, "resumed"), through)
    assert "loss.temperature" in through


class Whole(nn.Module):
    """A model whose loss is a method, and uses one of its parameters that is in no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = model()
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nnf.mse_loss(self.temperature * output, target)


def test_the_layers_of_a_model_are_not_those_of_its_loss(plan: Plan) -> None:
    whole = Whole()
    with zbv.Pipeline(plan, whole.layers, whole.loss) as pipe:
        assert {n for n, _ in pipe.named_parameters() if n.startswith("loss")} == {"loss.temperature"}
        pipe.step(*batch())
        assert all(gradient is not None for gradient in gradients(pipe).values())


class Built:
    """A model that builds its layers by name, from modules that it has."""

    def __init__(self) -> None:
        self.modules = dict(zip(NAMES, model(), strict=True))

    def layer_names(self) -> list[str]:
        return NAMES

    def build_layers(self, names: Sequence[str], device: torch.device) -> nn.Sequential:
        return nn.Sequential(OrderedDict((name, self.modules[name]) for name in names))


def test_models_that_a_loss_only_mentions_are_not_trained(plan: Plan) -> None:
    """A teacher, and the model itself."""
    teacher, built = model().eval(), Built()
    known = nn.ModuleDict(built.modules)

    def distilled(output: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(target) * len(known)
        return nnf.mse_loss(output, wanted)

    with zbv.Pipeline(plan, built, distilled) as pipe:
        assert not [name for name in pipe.state_dict() if name.startswith("loss")]
        pipe.step(*batch())
    learning = model().eval()
    pipe = zbv.Pipeline(plan, model(), lambda output, target: nnf.mse_loss(output, learning(target)))
    with pytest.raises(zbv.ModelError, match="uses a trainable tensor"):
        pipe.step(*batch())


HIDDEN = {"temperature": torch.tensor(2.0, requires_grad=True)}


def test_a_parameter_that_cannot_be_found_is_refused_at_once(plan: Plan) -> None:
    def hidden(output: Tensor, target: Tensor) -> Tensor:
        return nnf.mse_loss(HIDDEN["temperature"] * output, target)

    pipe = zbv.Pipeline(plan, model(), hidden)
    with pytest.raises(zbv.ModelError, match=r"trainable tensor of shape \[\]"):
        pipe.step(*batch())
    assert HIDDEN["temperature"].grad is None


class Scaling(nn.Linear):
    """Has a trainable tensor that is not registered."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.scales = [torch.tensor(2.0, requires_grad=True)]

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.scales[0]


@pytest.mark.parametrize(("place", "of_plan"), [(0, "v"), (3, "v"), (3, "single"), (1, "recomputed")])
def test_a_tensor_that_a_layer_has_not_registered_is_refused_at_once(place: int, of_plan: str) -> None:
    """Its gradient would be that of the sum for a pair, and of one replica."""
    layers, scaling = model(), Scaling()
    layers[place] = scaling
    pipe = zbv.Pipeline(planned(of_plan), layers, Margin())
    with pytest.raises(zbv.ModelError, match=r"trainable tensor of shape \[\]"):
        pipe.step(*batch())
    assert scaling.scales[0].grad is None


def test_a_layer_with_the_name_of_the_loss_is_refused() -> None:
    layers = dict(zip(["loss", "b", "c", "d"], model(), strict=True))
    plan = searched(unit_problem(1, 2))
    with zbv.Pipeline(plan, layers, nnf.mse_loss) as pipe:
        pipe.step(*batch())
    with pytest.raises(zbv.InvalidRun, match="a layer named 'loss'"):
        zbv.Pipeline(plan, layers, Margin())


def test_measuring_the_layers_does_not_change_the_loss() -> None:
    loss = nn.Sequential(nn.BatchNorm1d(WIDTH))
    before = copy.deepcopy(loss.state_dict())

    def mean(output: Tensor, target: Tensor) -> Tensor:
        return nnf.mse_loss(loss(output), target)

    with zbv.Pipeline(None, model(), mean, microbatches=2, example=batch()) as pipe:
        torch.testing.assert_close(loss.state_dict(), before)
        assert all(parameter.grad is None for parameter in loss.parameters())
        assert "loss.loss.0.weight" in dict(pipe.named_parameters())


NO_GRAPH: dict[str, Loss] = {
    "detached": lambda output, target: nnf.mse_loss(output, target).detach(),
    "output detached": lambda output, target: nnf.mse_loss(output.detach(), target),
    "no_grad": torch.no_grad()(nnf.mse_loss),
    "item": lambda output, target: torch.tensor(nnf.mse_loss(output, target).item()),
    "numpy": lambda output, target: torch.tensor(((output.detach() - target).numpy() ** 2).mean()),
    "integers": lambda output, target: (output.argmax(1) == target.argmax(1)).float().mean(),
    "constant": lambda output, target: torch.zeros(()),
    "pair": lambda output, target: (nnf.mse_loss(output, target).detach(), 1.0),
}


@pytest.mark.parametrize(("kind", "of_plan"), [(kind, PLANS[at % 3]) for at, kind in enumerate(NO_GRAPH)])
def test_a_loss_without_a_graph_is_an_error(kind: str, of_plan: str) -> None:
    plan = planned(of_plan)
    with zbv.Pipeline(plan, model(), NO_GRAPH[kind]) as pipe:
        pipe.evaluate(*batch())  # needs no graph
    pipe = zbv.Pipeline(plan, model(), NO_GRAPH[kind])
    with pytest.raises(zbv.ModelError, match="does not depend on anything that requires a gradient"):
        pipe.step(*batch())
    assert all(parameter.grad is None for parameter in pipe.parameters())


def test_a_model_that_is_frozen_is_refused(plan: Plan) -> None:
    pipe = zbv.Pipeline(plan, model().requires_grad_(False), nnf.mse_loss)
    pipe.evaluate(*batch())
    with pytest.raises(zbv.InvalidRun, match="no parameter that requires a gradient"):
        pipe.step(*batch())


def test_a_frozen_last_stage_and_a_microbatch_without_labels_are_fine(plan: Plan) -> None:
    inputs, targets = batch()
    targets[:4] = 0.0

    def loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        rows = target[:, 0] != 0
        return (output - target).square().sum(1)[rows].sum(), rows.sum()

    layers = model()
    layers[1:].requires_grad_(False)
    with zbv.Pipeline(plan, layers, loss) as pipe:
        pipe.step(inputs, targets)
        first: Any = layers.get_parameter("0.weight").grad
        assert first.any()


class Detaching(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.detach())


def test_a_layer_that_detaches_trains_as_in_plain_autograd(plan: Plan) -> None:
    def layers() -> nn.Sequential:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Detaching(4, 4), nn.Linear(4, 4))

    reference = layers()
    train_plainly(reference, nnf.mse_loss, batch())
    with zbv.Pipeline(plan, layers(), nnf.mse_loss) as pipe:
        pipe.step(*batch())
        for name, expected in gradients(reference).items():
            own = gradients(pipe)[name]
            if expected is None:
                assert own is None or not own.any()  # zeros cross the boundary between stages
            else:
                torch.testing.assert_close(own, expected)
