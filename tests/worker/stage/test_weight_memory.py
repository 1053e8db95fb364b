"""W adds to gradients without a temporary tensor of the weight's size."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from zbv_worker.measure.live_bytes import LiveBytes
from zbv_worker.stage.main_gradients import use_main_gradients
from zbv_worker.stage.program import AUTOCAST
from zbv_worker.stage.stage import Stage
from zbv_worker.stage.weight_grads import gradient_of

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


class Looked(nn.Module):
    """An embedding that multiplies, so that a middle stage can have it."""

    def __init__(self, vocabulary: int, indices: Tensor):
        super().__init__()
        self.table = nn.Embedding(vocabulary, 8)
        self.indices = indices

    def forward(self, x: Tensor) -> Tensor:
        looked: Tensor = self.table(self.indices)
        return x * looked


@pytest.mark.parametrize("kind", ["float32", "autocast", "bfloat16"])
def test_w_of_an_embedding_needs_no_temporary_of_the_tables_size(kind: Kind) -> None:
    stage = stage_of(Looked(5000, torch.tensor([1, 2, 1])), kind)
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
        stage.forward(microbatch, x if kind == "bfloat16" else x.float(), split=True)
        stage.backward_input(microbatch, gradient)
        stage.backward_weight(microbatch)
        expected += gradient.t().mm(x)
    found = gradient_of(module.weight)
    assert found is not None
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)


def test_the_operator_that_gpus_accumulate_with_takes_these_dtypes() -> None:
    """Torch's shape functions state the rule; the kernel exists on CUDA only."""
    total = torch.empty(5, 3, device="meta")
    left, right = (torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((5, 2), (2, 3)))
    assert torch.addmm(total, left, right, out_dtype=torch.float32, out=total) is total
    assert torch.mm(left, right, out_dtype=torch.float32).dtype == torch.float32
