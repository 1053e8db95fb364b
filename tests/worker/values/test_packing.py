"""Tensors travel as one tensor and arrive equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from zbv_worker.transport.endpoints import Crossing
from zbv_worker.values.packing import Packing, copied, zero_gradient
from zbv_worker.values.structure import FLOATS, Structure, TensorSpec

CPU = torch.device("cpu")
DTYPES = (*FLOATS, torch.int64, torch.int16, torch.bool, torch.complex128, torch.float8_e5m2)
specs = st.builds(TensorSpec, st.lists(st.integers(0, 4), max_size=3).map(tuple), st.sampled_from(DTYPES))


def transposed(spec: TensorSpec) -> Tensor:
    axes = tuple(range(len(spec.shape)))[::-1]
    return torch.randint(0, 2, spec.shape[::-1]).to(spec.dtype).permute(axes)


def bytes_of(tensor: Tensor) -> list[int]:
    return tensor.reshape(-1).view(torch.uint8).tolist()


@given(st.lists(specs, max_size=5))
def test_tensors_arrive_equal(some: list[TensorSpec]) -> None:
    """Even if they are not contiguous."""
    packing = Packing(some)
    tensors = [transposed(spec) for spec in some]
    sent = packing.pack(tensors, CPU)
    assert TensorSpec.of(sent) == packing.spec
    assert sent.numel() > 0 or len(some) == 1
    found = packing.unpack(sent.clone())
    assert [TensorSpec.of(tensor) for tensor in found] == some
    assert [*map(bytes_of, found)] == [*map(bytes_of, tensors)]


@pytest.mark.parametrize("dtype", FLOATS)
def test_one_floating_tensor_is_not_copied(dtype: torch.dtype) -> None:
    tensor = torch.zeros(2, 3, dtype=dtype)
    packing = Packing([TensorSpec.of(tensor)])
    assert packing.pack([tensor], CPU) is tensor
    assert packing.unpack(tensor)[0] is tensor


def nested() -> dict[str, Any]:
    return {"h": torch.rand(2, 3, requires_grad=True), "rest": (torch.arange(4), torch.rand(2), None)}


def test_only_tensors_with_a_gradient_get_one() -> None:
    value = nested()
    crossing = Crossing(Structure.of(value))
    gradient = (torch.rand(2, 3),)
    sent = crossing.packed_gradient(gradient, CPU)
    assert sent is gradient[0]  # one floating tensor is not copied
    assert crossing.unpacked_gradient(sent) == gradient
    assert crossing.gradient.spec == TensorSpec((2, 3), torch.float32)
    (zeros,) = zero_gradient(value)
    assert not zeros.any()


def test_a_value_without_gradients_sends_something() -> None:
    crossing = Crossing(Structure.of((torch.arange(3), torch.rand(2))))
    sent = crossing.packed_gradient((), CPU)
    assert TensorSpec.of(sent) == crossing.gradient.spec
    assert sent.nbytes > 0
    assert crossing.unpacked_gradient(sent) == ()


def test_a_copy_keeps_its_marks() -> None:
    value = nested()
    found = copied(value)
    assert Structure.of(found) == Structure.of(value)
    assert found["h"].is_leaf
    assert found["h"].data_ptr() != value["h"].data_ptr()
