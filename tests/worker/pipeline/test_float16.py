"""A pipeline in float16 scales its loss, and leaves out steps whose gradients overflow."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.gradients import gradients
from support.thread_pipeline import on_ranks, plan_of, returned
from torch import Tensor, nn
from zbv_worker.pipeline.pipeline import Pipeline

WIDTH = 8
FIRST_SCALE = 2.0**16
PLAN = plan_of(2, "v")


class Tiny(nn.Module):
    """A loss whose gradients float16 alone would round to zero."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output.float(), target) * 1e-6


def layers() -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Linear(WIDTH, WIDTH) for _ in range(8)]


def batch(factor: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    pair = torch.randn(16, WIDTH, generator=generator), torch.randn(16, WIDTH, generator=generator)
    return pair[0] * factor, pair[1] * factor


def scale_of(pipe: Pipeline) -> float:
    return pipe._own.loss_scale.value


def on_two(program: Any, precision: str, replicas: int = 1) -> list[Any]:
    return returned(on_ranks(PLAN, layers, Tiny(), program, replicas=replicas, precision=precision))


@pytest.mark.parametrize("replicas", [1, 2])
def test_small_gradients_survive_and_add_up(replicas: int) -> None:
    def program(pipe: Pipeline) -> Any:
        losses = [pipe.step(*batch()) for _ in range(2)]
        return gradients(pipe), losses[-1]

    for (found, loss), (expected, exact) in zip(
        on_two(program, "float16", replicas), on_two(program, "float32", replicas), strict=True
    ):
        for name, gradient in found.items():
            assert float((gradient - expected[name]).norm()) <= 0.02 * float(expected[name].norm())
            assert float(gradient.abs().max()) < 1e-5  # not scaled
        if loss is not None:
            assert float(loss) == pytest.approx(float(exact), rel=0.01)


def test_a_step_whose_gradients_overflow_changes_nothing_and_halves_the_scale() -> None:
    def program(pipe: Pipeline) -> Any:
        pipe.step(*batch(3e4))
        first = gradients(pipe), scale_of(pipe)
        pipe.step(*batch())
        kept = copy.deepcopy(gradients(pipe))
        pipe.step(*batch(3e4))
        return first, kept, gradients(pipe), scale_of(pipe)

    for (first, scale), kept, after, newest in on_two(program, "float16"):
        assert set(first.values()) <= {None}
        assert (scale, newest) == (FIRST_SCALE / 2, FIRST_SCALE / 4)
        assert all(bool(each.isfinite().all()) for each in kept.values())
        torch.testing.assert_close(after, kept, rtol=0, atol=0)


def test_values_that_no_scale_makes_finite_reach_the_user() -> None:
    def program(pipe: Pipeline) -> Any:
        while scale_of(pipe) > 1.0:
            pipe.step(*batch(float("nan")))
            assert set(gradients(pipe).values()) <= {None}
        pipe.step(*batch(float("nan")))
        return gradients(pipe)

    for found in on_two(program, "float16"):
        assert any(not bool(each.isfinite().all()) for each in found.values())
