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
from zbv_worker.values.structure import FLOATS, Structure, TensorSpec, tensors_of

CPU = torch.device("cpu")
DTYPES = (*FLOATS, torch.int64, torch.int16, torch.bool, torch.complex128, torch.float8_e5m2)
specs = st.builds(TensorSpec, st.lists(st.integers(0, 4), max_size=3).map(tuple), st.sampled_from(DTYPES))


def filled(spec: TensorSpec) -> Tensor:
    bits = torch.randint(0, 2, spec.shape)
    return bits.to(spec.dtype)


@given(st.lists(specs, max_size=5))
def test_tensors_arrive_equal(some: list[TensorSpec]) -> None:
    packing = Packing(some)
    tensors = [filled(spec) for spec in some]
    sent = packing.pack(tensors, CPU)
    assert TensorSpec.of(sent) == packing.spec
    assert sent.numel() > 0 or len(some) == 1
    for found, tensor in zip(packing.unpack(sent.clone()), tensors, strict=True):
        assert found.dtype is tensor.dtype
        assert found.shape == tensor.shape
        assert torch.equal(
            found.view(torch.uint8) if found.dim() else found,
            tensor.view(torch.uint8) if tensor.dim() else tensor,
        )


@pytest.mark.parametrize("dtype", FLOATS)
def test_one_floating_tensor_is_not_copied(dtype: torch.dtype) -> None:
    tensor = torch.zeros(2, 3, dtype=dtype)
    packing = Packing([TensorSpec.of(tensor)])
    assert packing.pack([tensor], CPU) is tensor
    assert packing.unpack(tensor)[0] is tensor


def test_views_that_are_not_contiguous_arrive_equal() -> None:
    tensors = [torch.arange(6.0).view(2, 3).t(), torch.arange(4)[::2]]
    packing = Packing([TensorSpec.of(tensor) for tensor in tensors])
    for found, tensor in zip(packing.unpack(packing.pack(tensors, CPU)), tensors, strict=True):
        assert torch.equal(found, tensor)


def nested() -> dict[str, Any]:
    return {"h": torch.rand(2, 3, requires_grad=True), "rest": (torch.arange(4), torch.rand(2), None)}


def test_a_value_arrives_with_its_marks() -> None:
    value = nested()
    crossing = Crossing(Structure.of(value))
    found = crossing.unpacked(crossing.packed(value, CPU))
    assert Structure.of(found) == crossing.structure
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(found), tensors_of(value), strict=True))
    assert [tensor.requires_grad for tensor in tensors_of(found)] == [True, False, False]


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
