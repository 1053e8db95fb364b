"""The GPU tests of W in half precision, on a CPU.

A build of torch without CUDA has no kernels of these operators. Here they have one for CPU tensors, which
requires what torch's own requires (``_mm_dtype_out_cuda``, ``_addmm_dtype_out_cuda`` and
``addmm_out_cuda_impl`` in ``aten/src/ATen/native/cuda/Blas.cpp``) and adds in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator

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
    test_the_products_of_groups_are_added_to_their_parts,
)
from torch import Tensor

__all__ = [
    "test_a_sum_that_is_a_part_of_a_bucket_is_added_to_in_place",
    "test_factors_of_different_dtypes_are_refused",
    "test_linear_layers_have_the_gradients_of_autograd",
    "test_products_are_added_to_the_sum_in_place",
    "test_the_products_of_groups_are_added_to_their_parts",
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
