"""Receive buffers are reused when nothing refers to them, and never earlier."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from support.paths import TESTS
from torch import Tensor, nn
from zbv_worker.host.local_ranks import LocalRanks, python_command
from zbv_worker.stage.split_backward import defer_weight_gradients
from zbv_worker.stage.weight_grads import WeightGrads
from zbv_worker.transport.buffers import ReceiveBuffers
from zbv_worker.values.structure import TensorSpec

CPU = torch.device("cpu")
SPEC = TensorSpec((3, 4), torch.float32)
BYTES = 3 * 4 * 4


def test_the_pool_holds_little_more_than_was_in_use_at_once() -> None:
    """Microbatches have other lengths of sequences in every step, and one may be far longer than the rest."""
    buffers, random = ReceiveBuffers(CPU), Random(0)
    held: list[Tensor] = []
    most = 0
    for _ in range(2000):
        length = random.choice([random.randint(1, 100), random.randint(1, 100), 3000])
        held.append(buffers.take(TensorSpec((length, 4), torch.bfloat16)))
        most = max(most, sum(tensor.nbytes for tensor in held))
        while len(held) > random.randrange(6):
            held.pop(random.randrange(len(held)))
        assert len({tensor.data_ptr() for tensor in held}) == len(held)
        # A tensor may lie in a buffer that is 1/8 larger, and 1/4 more memory is kept than was in use.
        assert buffers.nbytes <= 1.125 * 1.25 * most + 1


def test_a_smaller_tensor_reuses_a_buffer_that_is_a_little_too_large() -> None:
    buffers = ReceiveBuffers(CPU)
    place = buffers.take(TensorSpec((80, 4), torch.float32)).data_ptr()
    smaller = buffers.take(TensorSpec((75, 4), torch.float32))
    assert smaller.data_ptr() == place
    assert (smaller.shape, smaller.stride(), smaller.dtype) == ((75, 4), (4, 1), torch.float32)
    smaller.fill_(1.0)
    other = buffers.take(TensorSpec((75, 4), torch.float32))
    other.fill_(2.0)
    assert float(smaller.sum()) == 300.0
    assert buffers.take(TensorSpec((), torch.float32)).data_ptr() not in (place, other.data_ptr())


def test_a_free_buffer_is_reused() -> None:
    buffers = ReceiveBuffers(CPU)
    places = set()
    for _ in range(5):
        tensor = buffers.take(SPEC)
        places.add(tensor.data_ptr())
        del tensor
    assert len(places) == 1
    assert buffers.nbytes == BYTES


def linear_that_saved_it(tensor: Tensor) -> Any:
    """Only an autograd graph holds the tensor."""
    return nn.Linear(4, 2)(tensor.detach().requires_grad_()).sum()


def queue_of_weight_gradients(tensor: Tensor) -> Any:
    """Only the queue between I and W holds the tensor."""
    module = nn.Sequential(nn.Linear(4, 2))
    queue = WeightGrads()
    with defer_weight_gradients(module).into(queue):
        output = module(tensor.detach().requires_grad_())
    output.sum().backward()
    del output
    return queue


HOLDERS: list[Callable[[Tensor], Any]] = [
    lambda tensor: tensor,
    lambda tensor: tensor.detach(),
    lambda tensor: tensor[1:2, 3],
    lambda tensor: tensor.untyped_storage(),
    lambda tensor: tensor.numpy(),
    lambda tensor: tensor.__dlpack__(),
    linear_that_saved_it,
    queue_of_weight_gradients,
]


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_buffer_in_use_is_not_reused_until_released(
    holder: Callable[[Tensor], Any],
) -> None:
    buffers = ReceiveBuffers(CPU)
    tensor = buffers.take(SPEC)
    place = tensor.data_ptr()
    held = holder(tensor)
    del tensor
    others = [buffers.take(SPEC) for _ in range(3)]
    assert place not in [other.data_ptr() for other in others]
    assert buffers.nbytes == 4 * BYTES
    del others
    del held
    again = [buffers.take(SPEC) for _ in range(4)]
    assert place in [tensor.data_ptr() for tensor in again]
    assert buffers.nbytes == 4 * BYTES


def test_tensors_of_other_shapes_and_dtypes_share_buffers_of_their_size() -> None:
    buffers = ReceiveBuffers(CPU)
    specs = [SPEC, TensorSpec((4, 3), torch.float32), TensorSpec((3, 2), torch.float64)]
    for _ in range(2):
        for spec in specs:
            assert TensorSpec.of(buffers.take(spec)) == spec
    assert buffers.nbytes == BYTES


def test_buffers_in_use_outlive_the_pool() -> None:
    buffers = ReceiveBuffers(CPU)
    tensor = buffers.take(SPEC)
    tensor.fill_(7)
    buffers.clear()
    assert buffers.nbytes == 0
    assert float(tensor.sum()) == 7 * 12
    assert buffers.take(SPEC).data_ptr() != tensor.data_ptr()


def test_buffers_released_in_any_order_are_all_reused() -> None:
    buffers = ReceiveBuffers(CPU)
    random = Random(0)
    held: list[Tensor] = []
    for _ in range(300):
        while len(held) > random.randrange(6):
            held.pop(random.randrange(len(held)))
        held.append(buffers.take(SPEC))
        assert len({tensor.data_ptr() for tensor in held}) == len(held)
    assert buffers.nbytes <= 6 * BYTES


def test_after_the_first_step_receives_allocate_nothing(tmp_path: Path) -> None:
    """Two processes over gloo, with microbatches out of order; an evaluation allocates nothing either."""
    command = python_command("support.steady_rank", str(tmp_path))
    environment = {"PYTHONPATH": str(TESTS)}
    with LocalRanks([command] * 2, tmp_path / "logs", environment) as ranks:
        ranks.wait(timeout=120)
    found = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    for rank in found:
        first, *others = rank["taken"]
        assert first > 0
        assert others == [first] * 3
        assert first < rank["received"]  # buffers are reused within a step, too
        assert rank["after_close"] == 0
    assert sorted(map(int, found[0]["losses"])) == list(range(6))
    assert found[1]["losses"] == {}
