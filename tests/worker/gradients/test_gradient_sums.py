"""Gradient sums over replicas start at a stage's last W, and are complete at the step's end.

Gradients of several steps add up until the user zeroes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import zbv_worker.gradients.buckets
from support.thread_transport import ThreadHub, ThreadTransport
from torch import Tensor, nn
from zbv_worker.errors import InvalidRun
from zbv_worker.gradients.buckets import SummedGradients
from zbv_worker.gradients.gradients import Accumulation, Gradients, multiply, squares
from zbv_worker.stage.weight_grads import add_gradient
from zbv_worker.transport.channels import Reduction


class Watched(ThreadTransport):
    """Records which sums have started."""

    def __init__(self, hub: ThreadHub, rank: int):
        super().__init__(hub, rank)
        self.begun: list[int] = []

    def sum_over_replicas(self, tensor: Tensor) -> Reduction:
        self.begun.append(tensor.numel())
        return super().sum_over_replicas(tensor)


def two_stages() -> dict[int, nn.Module]:
    frozen = nn.Linear(5, 5)
    frozen.requires_grad_(False)
    return {
        0: nn.Sequential(nn.Linear(2, 3), frozen),
        3: nn.Sequential(nn.Linear(3, 1, bias=False), nn.Linear(1, 1).double()),
    }


class TwoReplicas(ThreadHub):
    def __init__(self) -> None:
        super().__init__(1, 2)

    def transport(self, rank: int) -> Watched:
        return Watched(self, rank)


def fill(modules: dict[int, nn.Module], value: float) -> None:
    for module in modules.values():
        for parameter in module.parameters():
            if parameter.requires_grad and parameter.grad is not None:
                parameter.grad.add_(value)


def test_a_stages_sum_starts_after_its_last_addition() -> None:
    def work(transport: ThreadTransport) -> None:
        assert isinstance(transport, Watched)
        modules = two_stages()
        gradients = SummedGradients(modules, transport)
        for step in range(2):
            transport.begun.clear()
            gradients.begin()
            fill(modules, transport.replica + 1.0)
            gradients.stage_done(3)
            assert sorted(transport.begun) == [2, 3]  # 1 + 1 doubles, 3 floats: one buffer per type
            gradients.stage_done(0)
            assert sorted(transport.begun) == [2, 3, 9]
            gradients.finish(10.0)
            for parameter in gradients.parameters:
                assert torch.equal(parameter.grad, torch.full_like(parameter, 3.0)), step  # type: ignore[arg-type]
        # Each of the two replicas contributes half of 14 squares of 3.
        squared: Any = gradients.square_sum()
        assert float(squared) == pytest.approx(14 * 9 / 2)

    TwoReplicas().run(work)


def test_frozen_parameters_take_no_part() -> None:
    modules = two_stages()
    found = Gradients(modules).parameters
    assert len(found) == 5
    assert all(parameter.requires_grad for parameter in found)


def test_a_parameter_of_two_stages_is_summed_after_both() -> None:
    def work(transport: ThreadTransport) -> None:
        assert isinstance(transport, Watched)
        modules: dict[int, nn.Module] = {0: nn.Linear(2, 2, bias=False), 3: nn.Linear(2, 2, bias=False)}
        modules[3].register_parameter("weight", modules[0].get_parameter("weight"))
        gradients = SummedGradients(modules, transport)
        gradients.begin()
        gradients.stage_done(3)
        assert transport.begun == []
        gradients.stage_done(0)
        assert transport.begun == [4]

    TwoReplicas().run(work)


def test_large_stages_are_summed_in_pieces_the_last_layers_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zbv_worker.gradients.buckets, "_BUCKET_BYTES", 48)
    hub = ThreadHub(1, 1)
    transport = Watched(hub, 0)
    layers = nn.Sequential(*(nn.Linear(size, 2, bias=False) for size in (1, 4, 3, 20)))
    gradients = SummedGradients({0: layers}, transport)
    gradients.begin()
    gradients.stage_done(0)
    assert transport.begun == [40, 6, 10]


def test_a_step_with_an_unfinished_stage_raises_an_error() -> None:
    gradients = SummedGradients(two_stages(), ThreadHub(1, 1).transport(0))
    gradients.begin()
    gradients.stage_done(0)
    with pytest.raises(RuntimeError, match=r"stages \[3\] are incomplete"):
        gradients.finish(1.0)


def test_sparse_gradients_are_refused() -> None:
    modules: dict[int, nn.Module] = {0: nn.Sequential(nn.Embedding(4, 2, sparse=True))}
    with pytest.raises(InvalidRun, match="found a sparse embedding, 0"):
        SummedGradients(modules, ThreadHub(1, 1).transport(0))


def test_squares_add_up_in_any_type() -> None:
    found: Any = squares([torch.full((3,), 2.0), torch.full((2,), 300.0).half(), torch.ones(4).double()])
    assert float(found) == pytest.approx(12 + 180_000 + 4)  # 300² overflows float16
    assert squares([]) is None


@pytest.mark.parametrize("factor", [0.1, torch.tensor(0.1, dtype=torch.float64)])
def test_a_factor_on_the_device_scales_like_a_number(factor: Tensor | float) -> None:
    found = [torch.full((3,), 3.0, dtype=dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16)]
    expected = [each * 0.1 for each in found]
    multiply(found, factor)
    for mine, right in zip(found, expected, strict=True):
        assert torch.equal(mine, right)
        assert mine.dtype == right.dtype


# --- several steps


KINDS = ("in place", "apart", "replicas")


def module(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Linear(2, 1, bias=False).to(dtype)


def stepping(kind: str, made: nn.Module) -> Callable[..., float]:
    """Run a step that adds a number to every element of the gradient; returns the gradients after it."""
    gradients: Gradients = Gradients({0: made})
    if kind == "replicas":  # one of them, so that sums are those of this process
        gradients = SummedGradients({0: made}, ThreadHub(1, 1).transport(0))
    accumulation = Accumulation(gradients)
    (parameter,) = made.parameters()

    def step(number: float, factor: float = 1.0) -> float:
        accumulation.begin(in_place=kind == "in place")
        add_gradient(parameter, torch.full_like(parameter, number))
        if kind == "replicas":
            gradients.stage_done(0)
        gradients.finish(1.0)
        accumulation.end(factor)
        assert parameter.grad is not None
        assert parameter.grad.dtype == parameter.dtype
        (number,) = set(parameter.grad.flatten().tolist())
        return number

    return step


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_steps_add_up_until_zero_grad(kind: str, set_to_none: bool) -> None:
    made = module()
    step = stepping(kind, made)
    assert [step(1.0), step(2.0)] == [1.0, 3.0]
    made.zero_grad(set_to_none=set_to_none)
    assert step(5.0) == 5.0


@pytest.mark.parametrize("kind", ["apart", "replicas"])
def test_a_step_is_scaled_and_earlier_steps_are_not(kind: str) -> None:
    step = stepping(kind, module())
    assert [step(1.0, factor=4.0), step(2.0, factor=0.5)] == [4.0, 5.0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_the_user_writes_to_grad_counts(kind: str, dtype: torch.dtype) -> None:
    made = module(dtype)
    step, (parameter,) = stepping(kind, made), made.parameters()
    step(2.0)
    assert parameter.grad is not None
    parameter.grad.mul_(3.0)  # as clipping does
    assert step(1.0) == 7.0
    parameter.grad = torch.full_like(parameter, 10.0)
    assert step(1.0) == 11.0


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_is_summed_in_float32_over_steps(kind: str) -> None:
    """In bfloat16, 1 + 1/512 is 1: a sum that is rounded after each step would never grow."""
    step = stepping(kind, module(torch.bfloat16))
    step(1.0)
    assert [step(1 / 512) for _ in range(64)][-1] == 1.125


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replaced_gradients_go_on_with_the_sum(dtype: torch.dtype) -> None:
    made, transport = module(dtype), ThreadHub(1, 1).transport(0)
    accumulation = Accumulation(SummedGradients({0: made}, transport))
    (parameter,) = made.parameters()
    for number in (1.0, 2.0):
        accumulation.begin(in_place=False)
        add_gradient(parameter, torch.full_like(parameter, number))
        accumulation.gradients.stage_done(0)
        accumulation.gradients.finish(1.0)
        accumulation.end()
        accumulation.replace(lambda: SummedGradients({0: made}, transport))
    assert parameter.grad is not None
    assert parameter.grad.dtype == dtype
    assert parameter.grad.tolist() == [[3.0, 3.0]]
