"""Microbatches with different weights train like one process with the whole batch."""

from __future__ import annotations

import pytest
import torch
from support.gradients import relative_error
from support.plans import random_plan
from support.trained import CPU, Remembering, train_alone, train_in_threads
from torch import Tensor
from zbv_worker.errors import ModelError, NotFinite
from zbv_worker.gradients import loss_scale
from zbv_worker.run.options import TrainingOptions
from zbv_worker.stage.loss import WeightedLoss
from zbv_worker.stage.stage import Stage

MICROBATCHES, STEPS = 3, 3


class Padded(Remembering):
    """Targets with padding (infinite); its length differs by microbatch."""

    def microbatch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        words, target = super().microbatch(step, index)
        tokens = self.tokens(step, index)
        return words, target.masked_fill(torch.arange(10).reshape(2, 5, 1) >= tokens, torch.inf)

    def tokens(self, step: int, index: int) -> int:
        """0 to 10 tokens."""
        return (7 * index + 3 * step) % 11

    def loss_sum(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        counts = target.isfinite()
        errors = (output - target.where(counts, output.detach())).square()
        return errors.where(counts, 0.0).sum(), counts[..., 0].sum()


class Empty(Padded):
    def tokens(self, step: int, index: int) -> int:
        return 0


@pytest.mark.parametrize(
    "options",
    [
        TrainingOptions(replicas=3, clip_norm=0.05),
        TrainingOptions(non_finite="skip"),
        TrainingOptions(replicas=2, parts=2, clip_norm=0.05, evaluate_every=1),
    ],
)
def test_training_equals_one_process_with_the_whole_batch(options: TrainingOptions) -> None:
    found = train_in_threads(*random_plan(), options, STEPS, model=Padded)
    count = MICROBATCHES * options.replicas * options.parts
    expected, losses, _ = train_alone(count, STEPS, clip_norm=options.clip_norm, model=Padded)
    assert found.losses == pytest.approx(losses, rel=1e-5)
    for parameters in found.parameters:
        assert relative_error(parameters, expected) < 1e-5


def test_gradients_are_divided_by_the_loss_scale_of_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "_FIRST_SCALE", 64.0)  # so that no step overflows
    found = train_in_threads(*random_plan(), TrainingOptions(precision="float16"), STEPS, model=Padded)
    expected, losses, _ = train_alone(MICROBATCHES, STEPS, model=Padded)
    assert found.losses == pytest.approx(losses, rel=0.01)
    assert relative_error(found.parameters[0], expected) < 0.02


def test_evaluation_is_a_mean_over_tokens() -> None:
    """An evaluation runs the plan once. Its weights do not leak into the step."""
    options = TrainingOptions(replicas=2, parts=2, evaluate_every=10)
    found = train_in_threads(*random_plan(), options, STEPS, model=Padded)
    evaluations = next(r.evaluations for r in found.reports if r.evaluations)
    assert evaluations[0] == pytest.approx(train_alone(MICROBATCHES * 2, STEPS, model=Padded)[1][0], rel=1e-5)
    assert found.losses == pytest.approx(train_alone(MICROBATCHES * 4, STEPS, model=Padded)[1], rel=1e-5)


def test_a_recomputed_loss_counts_its_weight_once() -> None:
    model = Padded()
    x, target = model.microbatch(0, 1)
    weights = []
    for is_recomputed in (False, True):
        module = model.build_stage(0, 1, CPU)
        stage = Stage(0, 1, module, 1, WeightedLoss(model.loss_sum), is_recomputed=is_recomputed)
        for microbatch, split in enumerate((True, False)):
            stage.forward(microbatch, x, target, split=split)
        stage.backward_input(0, None)
        stage.backward_weight(0)
        stage.backward(1, None)
        weights.append((stage.take_weight(), stage.take_weight()))
    assert weights == [(2.0 * model.tokens(0, 1), 0.0)] * 2


def test_a_step_without_tokens_is_not_finite() -> None:
    with pytest.raises(NotFinite, match="step 0"):
        train_in_threads(*random_plan(), TrainingOptions(clip_norm=1.0), 1, model=Empty)


@pytest.mark.parametrize(
    ("loss", "is_weighted", "message"),
    [
        (lambda x, y: (x.sum(), 1, 2), False, "the loss returned a tuple; .*a pair of a sum and its weight"),
        (lambda x, y: x, False, r"the loss returned a torch.float32 tensor of 12 numbers"),
        (lambda x, y: x.sum(), True, r"must return \(sum, weight\)"),
        (lambda x, y: (x.sum(), y), True, r"must return \(sum, weight\)"),
        (lambda x, y: (x, y.sum()), True, "tensor of 12 numbers"),
    ],
)
def test_an_invalid_loss_is_refused(loss, is_weighted: bool, message: str) -> None:  # type: ignore[no-untyped-def]
    stage = Stage(0, 1, torch.nn.Linear(3, 3), 1, WeightedLoss(loss) if is_weighted else loss)
    with pytest.raises(ModelError, match=message):
        stage.forward(0, torch.ones(4, 3), torch.ones(4, 3), split=True)
