"""The solver's estimate of a stage's activations against those of the worker's own GPT."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.adapters import Adapted
from torch import Tensor, nn
from zbv_models.estimate.config import EstimateConfig, estimate_layers, parse_config
from zbv_models.estimate.layers import LayerEstimate
from zbv_models.estimate.model import Transformer
from zbv_worker.measure.stage_memory import StageMemory, stage_memory
from zbv_worker.models.gpt import Block, Embedding, Head
from zbv_worker.models.text import VOCABULARY
from zbv_worker.stage.stage import Stage

SHAPES = [(192, 6, 128, 4), (64, 4, 96, 3), (64, 4, 32, 1), (128, 4, 16, 1)]
"""Width, heads, length, sequences. Of few tokens the gradient of a weight is most of the workspace."""
STAGES, RANK = 3, 8
MATRICES = {
    "query_key_value": "linear_qkv",
    "projection": "linear_proj",
    "expand": "linear_fc1",
    "contract": "linear_fc2",
}
"""A block's linear layers, and their names in Megatron-LM."""


def estimated(width: int, heads: int, length: int, sequences: int, **more: Any) -> tuple[LayerEstimate, ...]:
    model = Transformer(
        hidden=width, layers=1, heads=heads, vocabulary=VOCABULARY, sequence=length,
        microbatch_size=sequences, dtype="float32", **more,
    )  # fmt: skip
    config: EstimateConfig = parse_config(
        {
            "model": model.model_dump(),
            "parallel": {"pp_degree": 1, "microbatches": 1},
            "device": {"achieved_tflops": 1},
        }
    )
    return estimate_layers(config)


def measured(index: int, module: nn.Module, input: Tensor, target: Tensor | None = None) -> StageMemory:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    stage = Stage(index, STAGES, module, 1, None if target is None else loss)
    width = next(iter(module.parameters())).shape[-1]  # an embedding's, or a norm's
    gradient = torch.randn(*input.shape[:2], width) if target is None else None
    return stage_memory(stage, input, target, gradient, torch.device("cpu"))


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_keep_exactly_the_estimated_bytes(shape: tuple[int, int, int, int]) -> None:
    width, heads, length, sequences = shape
    block = estimated(*shape)[1].plain
    found = measured(
        1, nn.Sequential(Block(width, heads), Block(width, heads)), torch.randn(sequences, length, width)
    )
    assert (found.after_forward, found.after_input) == (2 * block.after_forward, 2 * block.after_input)
    assert found.workspace == pytest.approx(block.workspace, rel=0.02)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_embedding_and_the_head_keep_the_estimated_bytes(shape: tuple[int, int, int, int]) -> None:
    width, _, length, sequences = shape
    embedding, _, head = estimated(*shape)
    characters = torch.randint(0, VOCABULARY, (sequences, length))
    first = measured(0, Embedding(width, length), characters)
    assert first.after_forward == embedding.plain.after_forward
    assert first.after_input == embedding.plain.after_input
    assert first.workspace == pytest.approx(embedding.plain.workspace, rel=0.02)

    last = measured(STAGES - 1, Head(width), torch.randn(sequences, length, width), characters)
    assert last.after_forward + characters.nbytes == pytest.approx(head.plain.after_forward, abs=64)
    assert last.after_input == pytest.approx(head.plain.after_input, abs=64)
    assert last.workspace == pytest.approx(head.plain.workspace, rel=0.02)


@pytest.mark.parametrize("adapted", [(), *((name,) for name in MATRICES), tuple(MATRICES)])
@pytest.mark.parametrize("shape", SHAPES)
def test_frozen_blocks_with_and_without_adapters_keep_exactly_the_estimated_bytes(
    shape: tuple[int, int, int, int], adapted: tuple[str, ...]
) -> None:
    width, heads, length, sequences = shape
    keys: dict[str, Any] = {"frozen": ["layers"]}
    if adapted:
        keys |= {"lora_rank": RANK, "target_modules": [MATRICES[name] for name in adapted]}
    block = estimated(*shape, **keys)[1].plain
    blocks = nn.Sequential(Block(width, heads), Block(width, heads)).requires_grad_(False)
    for made in blocks:
        for name in adapted:
            setattr(made, name, Adapted(getattr(made, name), RANK))
    found = measured(1, blocks, torch.randn(sequences, length, width))
    assert (found.after_forward, found.after_input) == (2 * block.after_forward, 2 * block.after_input)
    assert found.workspace == pytest.approx(block.workspace, rel=0.02)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_frozen_ends_keep_the_estimated_bytes(shape: tuple[int, int, int, int]) -> None:
    width, _, length, sequences = shape
    characters = torch.randint(0, VOCABULARY, (sequences, length))
    first = measured(0, Embedding(width, length).requires_grad_(False), characters)
    embedding = estimated(*shape, frozen=["embedding"])[0].plain
    assert (first.after_forward, first.after_input) == (0, 0)
    assert (embedding.after_forward, embedding.after_input) == (0, 0)

    head = estimated(*shape, frozen=["head"])[-1].plain
    last = measured(
        STAGES - 1, Head(width).requires_grad_(False), torch.randn(sequences, length, width), characters
    )
    assert last.after_forward + characters.nbytes == pytest.approx(head.after_forward, abs=64)
    assert last.after_input == pytest.approx(head.after_input, abs=64)


def test_frozen_blocks_below_all_that_trains_keep_nothing() -> None:
    width, heads, length, sequences = SHAPES[0]
    block = estimated(*SHAPES[0], frozen=["embedding", "layers"])[1]
    blocks = nn.Sequential(Block(width, heads), Block(width, heads)).requires_grad_(False)
    found = measured(0, blocks, torch.randn(sequences, length, width))
    assert (found.after_forward, found.after_input) == (0, 0)
    assert (block.plain.after_forward, block.plain.after_input) == (0, 0)
    assert block.flops.backward_input == block.flops.backward_weight == 0 < block.flops.forward
