"""Training with replicas, clipping, mixed precision, tied parameters and evaluation, against one process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import pytest
import torch
from support.gradients import relative_error
from support.plans import random_plan, unit_problem
from support.trained import CPU, Remembering, train_alone, train_in_threads
from torch import Tensor, nn
from zbv_solver.construct.baselines import baseline
from zbv_worker.errors import InvalidRun
from zbv_worker.model.model import Model
from zbv_worker.run.options import TrainingOptions
from zbv_worker.stage.loss import add_auxiliary_loss

MICROBATCHES = 3
STEPS = 3


class FetchedAhead(Remembering):
    fetch_ahead = 2


@pytest.mark.parametrize(("replicas", "parts", "model"), [(3, 1, Remembering), (2, 2, FetchedAhead)])
def test_replicas_and_parts_train_as_one_process_with_all_their_microbatches(
    replicas: int, parts: int, model: type[Remembering]
) -> None:
    options = TrainingOptions(replicas=replicas, parts=parts)
    found = train_in_threads(*random_plan(seed=parts), options, STEPS, model=model)
    expected, losses, _ = train_alone(MICROBATCHES * replicas * parts, STEPS)
    assert len(found.parameters) == replicas
    for parameters in found.parameters:
        assert relative_error(parameters, expected) < 1e-5
    assert found.losses == pytest.approx(losses, rel=1e-5)


class Balanced(nn.Module):
    """A layer with an auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).tanh()
        return add_auxiliary_loss(y, y.square().mean())


def balanced_model() -> Model:
    torch.manual_seed(1)
    layers = [Balanced() for _ in range(4)]
    return Model(layers, loss=nn.functional.mse_loss, data=lambda step, index: (numbers(index), numbers(9)))


def numbers(index: int) -> Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(index))


def test_auxiliary_losses_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of a replica's ranks add up, and the mean of the replicas is that over all microbatches."""
    found = train_in_threads(*random_plan(), TrainingOptions(replicas=2, parts=2), 1, model=balanced_model)
    count = 2 * 2 * MICROBATCHES
    expected = 0.0
    for index in range(count):
        x = numbers(index)
        for name in balanced_model().layer_names():
            x = balanced_model().build_layers([name], CPU)(x)
            expected += float(x.detach().square().mean()) / count
    lines: list[float | None] = [report.lines[0].auxiliary_loss for report in found.reports]
    assert sum(line or 0.0 for line in lines) / 2 == pytest.approx(expected, rel=1e-5)
    first = found.reports[0]
    assert first.document()["steps"][0]["auxiliary_loss"] == lines[0]
    assert f"step 0: auxiliary loss {lines[0]:.4g} of rank 0's stages" in capsys.readouterr().err


@pytest.mark.parametrize(("replicas", "clip_norm"), [(1, 0.05), (2, 0.05), (1, 1e6)])
def test_gradients_are_clipped_by_the_norm_of_the_whole_model(replicas: int, clip_norm: float) -> None:
    options = TrainingOptions(replicas=replicas, clip_norm=clip_norm)
    found = train_in_threads(*random_plan(), options, STEPS)
    expected, _, norms = train_alone(MICROBATCHES * replicas, STEPS, clip_norm=clip_norm)
    assert 0.05 < min(norms) <= max(norms) < 1e6  # so every step is clipped, or none
    for parameters in found.parameters:
        assert relative_error(parameters, expected) < 1e-5
    for report in found.reports:
        assert [line.updated.gradient_norm for line in report.lines] == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize(("precision", "tolerance"), [("bfloat16", 0.05), ("float16", 0.01)])
def test_mixed_precision_trains_alike(precision: Literal["bfloat16", "float16"], tolerance: float) -> None:
    found = train_in_threads(*random_plan(), TrainingOptions(precision=precision), STEPS)
    expected, losses, _ = train_alone(MICROBATCHES, STEPS)
    assert found.losses == pytest.approx(losses, rel=tolerance)
    assert found.losses != pytest.approx(losses, rel=1e-6)  # so it used the smaller type
    assert 0 < relative_error(found.parameters[0], expected) < 3 * tolerance
    assert all(p.dtype == torch.float32 for p in found.parameters[0].values())


class TiedModel(Remembering):
    """First and last layer share their weights, of which two ranks have copies."""

    def tied_parameters(self) -> Sequence[tuple[str, str]]:
        return [("layer0.weight", "layer7.1.weight")]


TWO_RANKS = baseline("1f1b", unit_problem(2, MICROBATCHES))


@pytest.mark.parametrize(("group", "refused"), [("name", False), ("index", True)])
def test_copies_of_a_tied_parameter_are_trained_alike_or_refused(group: str, refused: bool) -> None:
    """An optimizer that chooses settings by name gets every copy under the name of the first."""

    class Grouped(TiedModel):
        def named_optimizer(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
            groups = [
                {"params": [parameter], "lr": 0.05 if (at == 0 if refused else "layer0" in name) else 0.02}
                for at, (name, parameter) in enumerate(parameters)
            ]
            return torch.optim.SGD(groups)

    if refused:
        with pytest.raises(InvalidRun, match=r"layer0\.weight on rank 0 has lr=0\.05; layer7"):
            train_in_threads(*TWO_RANKS, TrainingOptions(), STEPS, model=Grouped)
        return
    found = train_in_threads(*TWO_RANKS, TrainingOptions(), STEPS, model=Grouped)
    (parameters,) = found.parameters
    assert torch.equal(parameters["layer0.weight"], parameters["layer7.1.weight"])


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("layer9.weight", r"tied_parameters names 'layer9\.weight', which no rank has"),
        ("layer7.0.weight", r"must be alike, but layer0\.weight is \[.*\] of float32; layer7"),
    ],
)
def test_tied_parameters_that_do_not_exist_or_differ_are_refused(other: str, said: str) -> None:
    class Mistaken(TiedModel):
        def tied_parameters(self) -> Sequence[tuple[str, str]]:
            return [("layer0.weight", other)]

    with pytest.raises(InvalidRun, match=said):
        train_in_threads(*TWO_RANKS, TrainingOptions(), 1, model=Mistaken)


class Measured(Remembering):
    """Has separate data for evaluation."""

    def evaluation_microbatch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        return self.microbatch(50, index)


def test_evaluation_is_the_loss_of_the_forwards_and_changes_nothing() -> None:
    replicas = 2
    options = TrainingOptions(replicas=replicas, evaluate_every=2)
    found = train_in_threads(*random_plan(), options, 4, model=Measured)
    plain = train_in_threads(*random_plan(), TrainingOptions(replicas=replicas), 4)
    assert found.losses == plain.losses
    evaluations = next(r.evaluations for r in found.reports if r.evaluations)
    assert list(evaluations) == [0, 2, 4]
    module = Measured().build_stage(0, 1, CPU).eval()
    count = MICROBATCHES * replicas
    with torch.no_grad():
        data = [Measured().microbatch(50, index) for index in range(count)]
        losses = [float(Measured().loss(module(x), y)) for x, y in data]
    assert evaluations[0] == pytest.approx(sum(losses) / count, rel=1e-5)


class Scheduled(Remembering):
    """The learning rate halves with every step."""

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def test_a_schedule_of_the_learning_rate_is_followed() -> None:
    found = train_in_threads(*random_plan(), TrainingOptions(), STEPS, model=Scheduled)
    expected, losses, _ = train_alone(MICROBATCHES, STEPS, model=Scheduled)
    assert found.losses == pytest.approx(losses, rel=1e-5)
    assert relative_error(found.parameters[0], expected) < 1e-5
