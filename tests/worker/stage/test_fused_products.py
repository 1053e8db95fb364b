"""W of parameters in half precision on a GPU, where torch adds a product to a float32 sum in one operator.

A build of torch without CUDA has no kernels of these operators. Here they have one for CPU tensors, which
requires what torch's own requires (``_mm_dtype_out_cuda``, ``_addmm_dtype_out_cuda`` and
``addmm_out_cuda_impl`` in ``aten/src/ATen/native/cuda/Blas.cpp``) and adds in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from zbv_worker.stage.main_gradients import (
    add_grouped_products,
    add_product,
    gradient_of,
    set_gradient,
    use_main_gradients,
)
from zbv_worker.stage.stage import Stage

HALVES = [torch.bfloat16, torch.float16]


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
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The calls of the operators; meanwhile all tensors say that they are on a GPU."""
    called: list[str] = []

    def mm(left: Tensor, right: Tensor, out_dtype: torch.dtype) -> Tensor:
        called.append("mm")
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
        called.append("addmm")
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
        yield called


def half_parameter(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
    use_main_gradients([parameter])
    return parameter


def factor(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def transposed(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return factor(columns, rows, dtype=dtype).t()


def sliced(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return factor(rows, 2 * columns, dtype=dtype)[:, ::2]


def expanded(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return factor(rows, 1, dtype=dtype).expand(rows, columns)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("left", [transposed, sliced, expanded])
@pytest.mark.parametrize(("rows", "n", "columns"), [(5, 7, 3), (1, 7, 3), (5, 7, 1), (5, 0, 3), (0, 7, 3)])
def test_products_are_added_to_the_sum_in_place(
    calls: list[str], dtype: torch.dtype, left: Callable[..., Tensor], rows: int, n: int, columns: int
) -> None:
    parameter = half_parameter(rows, columns, dtype=dtype)
    a, b = left(rows, n, dtype), factor(n, columns, dtype=dtype)
    product = a.float() @ b.float()
    add_product(parameter, a, b)
    total = gradient_of(parameter)
    assert total is not None
    add_product(parameter, a, b)
    assert gradient_of(parameter) is total
    assert total.dtype == torch.float32
    rounding = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype] if rows == 1 else 1e-6
    torch.testing.assert_close(total, 2 * product, rtol=rounding, atol=rounding)
    assert calls == ["mm", "addmm"][: min(rows, 2) or 1]


def test_a_sum_that_is_a_part_of_a_bucket_is_added_to_in_place(calls: list[str]) -> None:
    parameter, bucket = half_parameter(4, 3), torch.ones(20)
    set_gradient(parameter, bucket[2:14].view(4, 3))
    a, b = factor(4, 6, dtype=torch.bfloat16), factor(6, 3, dtype=torch.bfloat16)
    add_product(parameter, a, b)
    torch.testing.assert_close(bucket[2:14].view(4, 3), 1 + a.float() @ b.float())
    assert calls == ["addmm"]


def test_factors_of_different_dtypes_are_refused(calls: list[str]) -> None:
    parameter = half_parameter(4, 3)
    set_gradient(parameter, torch.zeros(4, 3))
    with pytest.raises(RuntimeError, match="must have the same dtype"):
        add_product(parameter, factor(4, 6, dtype=torch.bfloat16), factor(6, 3, dtype=torch.float32))


@pytest.mark.parametrize("dtype", HALVES)
def test_the_products_of_groups_are_added_to_their_parts(calls: list[str], dtype: torch.dtype) -> None:
    parameter = half_parameter(3, 4, 5, dtype=dtype)
    grad, x, ends = factor(9, 4, dtype=dtype), factor(9, 5, dtype=dtype), torch.tensor([2, 2, 9])
    for _ in range(2):
        add_grouped_products(parameter, grad, x, ends)
    parts = [grad[a:b].float().t() @ x[a:b].float() for a, b in ((0, 2), (2, 2), (2, 9))]
    torch.testing.assert_close(gradient_of(parameter), 2 * torch.stack(parts))
    assert calls == ["addmm"] * 4


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("split", [True, False])
def test_linear_layers_have_the_gradients_of_autograd(
    calls: list[str], dtype: torch.dtype, *, split: bool
) -> None:
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
    x, grad = factor(2, 5, 6, dtype=dtype), factor(2, 5, 1, dtype=dtype)
    module(x).backward(grad)
    right = {name: 2 * p.grad.float() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    use_main_gradients(module.parameters())
    stage = Stage(0, 2, module, microbatches=2)
    for microbatch in range(2):
        stage.forward(microbatch, x, split=split)
        if split:
            stage.backward_input(microbatch, grad)
            stage.backward_weight(microbatch)
        else:
            stage.backward(microbatch, grad)
    for name, parameter in module.named_parameters():
        total = gradient_of(parameter)
        assert total is not None
        assert total.dtype == torch.float32
        torch.testing.assert_close(total, right[name], rtol=0.02, atol=0.02)
    assert ("addmm" in calls) == split
