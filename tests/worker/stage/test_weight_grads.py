"""W adds its products to the sums of gradients in place, without temporaries of a weight's size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pytest
import torch
from gpu.test_weight_gradients import (
    HALVES,
    Calls,
    Noted,
    test_a_sum_that_is_a_part_of_a_bucket_is_added_to_in_place,
    test_factors_of_different_dtypes_are_refused,
    test_linear_layers_have_the_gradients_of_autograd,
    test_products_are_added_to_the_sum_in_place,
    test_products_of_groups_are_added_up,
)
from support.functions import Function
from support.stages import forth_and_back
from torch import Tensor, nn
from zbv_worker.measure.live_bytes import LiveBytes
from zbv_worker.stage.main_gradients import use_main_gradients
from zbv_worker.stage.program import AUTOCAST
from zbv_worker.stage.stage import Stage
from zbv_worker.stage.weight_grads import gradient_of

__all__ = [
    "test_a_sum_that_is_a_part_of_a_bucket_is_added_to_in_place",
    "test_factors_of_different_dtypes_are_refused",
    "test_linear_layers_have_the_gradients_of_autograd",
    "test_products_are_added_to_the_sum_in_place",
    "test_products_of_groups_are_added_up",
]


@pytest.fixture
def device() -> torch.device:
    """The tensors are on the CPU."""
    return torch.device("cpu")


def _checked(left: Tensor, right: Tensor, out_dtype: torch.dtype, out: Tensor) -> None:
    if not (left.dim() == right.dim() == 2 and left.shape[1] == right.shape[0]):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    if left.dtype != right.dtype:
        raise RuntimeError("mat1 and mat2 must have the same dtype")
    if out_dtype != torch.float32 or left.dtype not in HALVES:
        raise RuntimeError("out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs")
    if out_dtype != out.dtype:
        raise RuntimeError("out_dtype must be the same as the dtype of the provided out tensor")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """The calls of the operators; meanwhile all tensors say that they are on a GPU."""

    def mm(left: Tensor, right: Tensor, out_dtype: torch.dtype) -> Tensor:
        out = torch.zeros(left.shape[0], right.shape[1], dtype=out_dtype)
        _checked(left, right, out_dtype, out)
        return torch.mm(left.float(), right.float())

    def addmm(
        total: Tensor,
        left: Tensor,
        right: Tensor,
        out_dtype: torch.dtype,
        *,
        beta: float = 1,
        alpha: float = 1,
        out: Tensor,
    ) -> Tensor:
        _checked(left, right, out_dtype, out)
        if total.dtype not in (out_dtype, left.dtype):
            raise RuntimeError("self dtype must match either out_dtype or mat1 dtype")
        if total.shape != out.shape or len(total) == 1:
            raise RuntimeError("a sum of another shape, or of one row, is taken for a bias")
        return torch.addmm(total.float(), left.float(), right.float(), beta=beta, alpha=alpha, out=out)

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("mm.dtype", mm, "CPU")
        library.impl("addmm.dtype_out", addmm, "CPU")
        monkeypatch.setattr(Tensor, "is_cuda", property(lambda self: True), raising=False)
        with Noted(called := Calls()):
            yield called


Kind = Literal["float32", "autocast", "bfloat16"]
TOKENS, INPUTS, OUTPUTS = 4, 1536, 3072
BLOCK = 1 << 20  # elements of a temporary


def stage_of(module: nn.Module, kind: Kind) -> Stage:
    module = module.bfloat16() if kind == "bfloat16" else module
    use_main_gradients(module.parameters())
    return Stage(1, 3, module, 1, autocast=AUTOCAST["bfloat16" if kind == "autocast" else "float32"])


def workspace_of_w(stage: Stage, x: Tensor, microbatch: int) -> int:
    """The most bytes that W holds beyond what is left when it ends."""
    output = stage.forward(microbatch, x, split=True)
    stage.backward_input(microbatch, torch.randn_like(output))
    with LiveBytes() as held:
        stage.backward_weight(microbatch)
    return held.peak - max(0, held.bytes)


@pytest.mark.parametrize("kind", ["float32", "autocast", "bfloat16"])
def test_w_of_a_linear_needs_no_temporary_of_the_weights_size(kind: Kind) -> None:
    torch.manual_seed(0)
    stage = stage_of(nn.Linear(INPUTS, OUTPUTS, bias=False), kind)
    x = torch.randn(TOKENS, INPUTS, dtype=torch.bfloat16 if kind == "bfloat16" else torch.float32)
    small = 0 if kind == "float32" else 2 * BLOCK
    assert [workspace_of_w(stage, x, microbatch) <= small for microbatch in range(3)] == [True] * 3
    assert 4 * BLOCK < INPUTS * OUTPUTS


@pytest.mark.parametrize("kind", ["float32", "autocast", "bfloat16"])
def test_w_of_an_embedding_needs_no_temporary_of_the_tables_size(kind: Kind) -> None:
    """The embedding multiplies, so that a middle stage can have it."""
    indices = torch.tensor([1, 2, 1])
    stage = stage_of(Function(lambda self, x: x * self.table(indices), table=nn.Embedding(5000, 8)), kind)
    x = torch.randn(3, 8, dtype=torch.bfloat16 if kind == "bfloat16" else torch.float32)
    assert max(workspace_of_w(stage, x, microbatch) for microbatch in range(3)) < 500


@pytest.mark.parametrize("kind", ["autocast", "bfloat16"])
def test_a_product_in_blocks_is_the_whole_product(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zbv_worker.stage.weight_grads._BLOCK_ELEMENTS", 64)
    module = nn.Linear(24, 40, bias=False)
    stage = stage_of(module, kind)
    expected = torch.zeros(40, 24)
    for microbatch in range(3):
        x, gradient = torch.randn(6, 24).bfloat16(), torch.randn(6, 40).bfloat16()
        forth_and_back(stage, x if kind == "bfloat16" else x.float(), gradient, microbatch=microbatch)
        expected += gradient.t().mm(x)
    torch.testing.assert_close(gradient_of(module.weight), expected)


def test_the_operator_that_gpus_accumulate_with_takes_these_dtypes() -> None:
    """Torch's shape functions state the rule; the kernel exists on CUDA only."""
    total = torch.empty(5, 3, device="meta")
    left, right = (torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((5, 2), (2, 3)))
    assert torch.addmm(total, left, right, out_dtype=torch.float32, out=total) is total
    assert torch.mm(left, right, out_dtype=torch.float32).dtype == torch.float32
