"""Compiled layers have the gradients of uncompiled ones, with F, I and W as well as with F and B."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor, nn
from zbv_worker.stage.main_gradients import gradient_of, use_main_gradients
from zbv_worker.stage.precision import AUTOCAST, Precision
from zbv_worker.stage.stage import Stage

WIDTH, TOKENS = 16, 12
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.*deprecated:DeprecationWarning")  # torch's own


class Block(nn.Module):
    """Norm, attention with a shared projection, dropout, and an MLP."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        key, value = self.project(self.norm(x)), self.project(x)
        x = x + nnf.scaled_dot_product_attention(key, key, value)
        found: Tensor = x + self.dropout(self.down(nnf.gelu(self.up(x))))
        return found


class First(nn.Module):
    """An embedding and a Linear, without a float input."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, WIDTH, padding_idx=3)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, indices: Tensor) -> Tensor:
        found: Tensor = self.mix(self.table(indices))
        return found


def gradients(
    module: nn.Module, *, is_compiled: bool, split: bool, index: int = 1, precision: Precision = "float32"
) -> dict[str, Tensor]:
    """The gradients of three microbatches, and the last input's gradient."""
    module = copy.deepcopy(module)
    use_main_gradients(module.parameters())
    layers = tuple(module) if isinstance(module, nn.Sequential) else None
    stage = Stage(index, 3, module, 1, autocast=AUTOCAST[precision], layers=layers, is_compiled=is_compiled)
    generator = torch.Generator().manual_seed(7)
    torch.manual_seed(11)
    found: dict[str, Tensor] = {}
    for microbatch in range(3):
        if index:
            x = torch.randn(2, TOKENS, WIDTH, generator=generator)
        else:
            x = torch.randint(20, (2, TOKENS), generator=generator)
        output = stage.forward(microbatch, x, split=split)
        seed = torch.randn(output.shape, generator=generator).to(output.dtype)
        backward: Callable[..., Tensor | None] = stage.backward_input if split else stage.backward
        input_gradient = backward(microbatch, seed)
        if split:
            stage.backward_weight(microbatch)
        if input_gradient is not None:
            found["input"] = input_gradient
    for name, parameter in module.named_parameters():
        gradient = gradient_of(parameter)
        assert gradient is not None, name
        found[name] = gradient
    if split and is_compiled:
        assert stage.split_share == stage.expected_share
    return found


def require_equal(
    module: nn.Module, *, split: bool, index: int = 1, precision: Precision = "float32"
) -> None:
    mine, expected = (
        gradients(module, is_compiled=is_compiled, split=split, index=index, precision=precision)
        for is_compiled in (True, False)
    )
    tolerance = 1e-5 if precision == "float32" else 3e-2
    for name, gradient in expected.items():
        difference = (mine[name] - gradient).norm() / gradient.norm()
        assert difference < tolerance, name


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_two_blocks_have_the_gradients_of_uncompiled_ones(split: bool, precision: Precision) -> None:
    torch.manual_seed(0)
    require_equal(nn.Sequential(Block(), Block()), split=split, precision=precision)


def test_dropout_draws_the_same_numbers() -> None:
    torch.manual_seed(0)
    require_equal(Block(dropout=0.5), split=True)


def test_the_first_stage_splits_its_embedding_too() -> None:
    torch.manual_seed(0)
    require_equal(First(), split=True, index=0)
