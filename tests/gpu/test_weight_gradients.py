"""W of parameters in half precision: torch adds a product to a float32 sum in one operator, only on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.stages import forth_and_back
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from zbv_worker.stage.main_gradients import use_main_gradients
from zbv_worker.stage.stage import Stage
from zbv_worker.stage.weight_grads import add_grouped_products, add_product, gradient_of, set_gradient

HALVES = [torch.bfloat16, torch.float16]
Calls = list[str]
OPERATORS = {torch.ops.aten.mm.dtype: "mm", torch.ops.aten.addmm.dtype_out: "addmm"}


class Noted(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Writes down which of the two operators run."""

    def __init__(self, calls: Calls):
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in OPERATORS:
            self._calls.append(OPERATORS[func])
        return func(*args, **(kwargs or {}))


@pytest.fixture
def calls() -> Iterator[Calls]:
    """The calls of the operators. If one is refused, use a torch that the project's tests run with."""
    with Noted(called := Calls()):
        yield called


def half_parameter(device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    """A parameter of zeros with a main gradient."""
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
    use_main_gradients([parameter])
    return parameter


def factor(device: torch.device, *shape: int, dtype: torch.dtype) -> Tensor:
    """Numbers that depend on the shape alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


def transposed(device: torch.device, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return factor(device, columns, rows, dtype=dtype).t()


def sliced(device: torch.device, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return factor(device, rows, 2 * columns, dtype=dtype)[:, ::2]


def expanded(device: torch.device, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return factor(device, rows, 1, dtype=dtype).expand(rows, columns)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("left", [transposed, sliced, expanded])
@pytest.mark.parametrize(("rows", "n", "columns"), [(5, 7, 3), (1, 7, 3), (5, 7, 1), (5, 0, 3), (0, 7, 3)])
def test_products_are_added_to_the_sum_in_place(
    calls: Calls,
    device: torch.device,
    dtype: torch.dtype,
    left: Callable[..., Tensor],
    rows: int,
    n: int,
    columns: int,
) -> None:
    parameter = half_parameter(device, rows, columns, dtype=dtype)
    a, b = left(device, rows, n, dtype), factor(device, n, columns, dtype=dtype)
    product = a.float() @ b.float()
    add_product(parameter, a, b)
    total = gradient_of(parameter)
    assert total is not None
    add_product(parameter, a, b)
    assert gradient_of(parameter) is total
    assert total.dtype == torch.float32
    rounding = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype] if rows == 1 else 1e-5
    torch.testing.assert_close(total, 2 * product, rtol=rounding, atol=rounding)
    assert calls == ["mm", "addmm"][: min(rows, 2) or 1]


def test_a_sum_that_is_a_part_of_a_bucket_is_added_to_in_place(calls: Calls, device: torch.device) -> None:
    parameter, bucket = half_parameter(device, 4, 3), torch.ones(20, device=device)
    set_gradient(parameter, bucket[2:14].view(4, 3))
    a, b = factor(device, 4, 6, dtype=torch.bfloat16), factor(device, 6, 3, dtype=torch.bfloat16)
    add_product(parameter, a, b)
    torch.testing.assert_close(bucket[2:14].view(4, 3), 1 + a.float() @ b.float())
    assert calls == ["addmm"]


def test_factors_of_different_dtypes_are_refused(calls: Calls, device: torch.device) -> None:
    parameter = half_parameter(device, 4, 3)
    set_gradient(parameter, torch.zeros(4, 3, device=device))
    with pytest.raises(RuntimeError, match="must have the same dtype"):
        add_product(
            parameter, factor(device, 4, 6, dtype=torch.bfloat16), factor(device, 6, 3, dtype=torch.float32)
        )


@pytest.mark.parametrize("dtype", HALVES)
def test_products_of_groups_are_added_up(calls: Calls, device: torch.device, dtype: torch.dtype) -> None:
    parameter = half_parameter(device, 3, 4, 5, dtype=dtype)
    grad, x, ends = (
        factor(device, 9, 4, dtype=dtype),
        factor(device, 9, 5, dtype=dtype),
        torch.tensor([2, 2, 9], device=device),
    )
    for _ in range(2):
        add_grouped_products(parameter, grad, x, ends)
    parts = [grad[a:b].float().t() @ x[a:b].float() for a, b in ((0, 2), (2, 2), (2, 9))]
    torch.testing.assert_close(gradient_of(parameter), 2 * torch.stack(parts))
    assert calls == ["addmm"] * 4


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("split", [True, False])
def test_linear_layers_have_the_gradients_of_autograd(
    calls: Calls, device: torch.device, dtype: torch.dtype, *, split: bool
) -> None:
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to(device, dtype)
    x, grad = factor(device, 2, 5, 6, dtype=dtype), factor(device, 2, 5, 1, dtype=dtype)
    module(x).backward(grad)
    right = {name: 2 * p.grad.float() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    use_main_gradients(module.parameters())
    stage = Stage(0, 2, module, microbatches=2)
    for _ in range(2):
        forth_and_back(stage, x, grad, split=split)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(gradient_of(parameter), right[name], rtol=0.02, atol=0.02)
    assert ("addmm" in calls) == split
