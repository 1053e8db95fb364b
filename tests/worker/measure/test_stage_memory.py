"""The memory of stages as measured, and as the solver estimates it for the worker's own GPT."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.functions import Adapted
from torch import Tensor, nn
from zbv_models.estimate.config import EstimateConfig, estimate_layers, parse_config
from zbv_models.estimate.layers import LayerEstimate
from zbv_models.estimate.model import Transformer
from zbv_solver.problem.stages import Placement
from zbv_worker.measure.live_bytes import LiveBytes
from zbv_worker.measure.stage_memory import StageMemory, received_bytes, stage_memory
from zbv_worker.models.gpt import Block, Embedding, Head
from zbv_worker.models.text import VOCABULARY
from zbv_worker.stage.stage import Stage

CPU = torch.device("cpu")
ROWS, WIDTH = 16, 32
TENSOR = ROWS * WIDTH * 4


def linear_stage() -> tuple[Stage, torch.Tensor]:
    stage = Stage(1, 3, nn.Linear(WIDTH, WIDTH, bias=False), 1)
    x = torch.randn(ROWS, WIDTH)
    stage.forward(0, x, split=False)
    stage.backward(0, torch.randn(ROWS, WIDTH))  # creates the parameters' gradients
    return stage, x


def test_a_linear_holds_its_input_after_f_also_its_outputs_gradient_after_i_and_nothing_after_w() -> None:
    stage, x = linear_stage()
    found = stage_memory(stage, x, None, torch.randn(ROWS, WIDTH), CPU)
    assert found.after_forward == TENSOR
    assert found.after_input == 2 * TENSOR
    assert found.after_weight == 0
    # B: the received gradient, and the gradients of the input and of the weight.
    assert found.workspace == 2 * TENSOR + WIDTH * WIDTH * 4


def test_f_counts_what_the_forward_of_a_fused_backward_keeps_under_autocast() -> None:
    stage = Stage(1, 3, nn.Linear(WIDTH, WIDTH, bias=False), 1, autocast=torch.bfloat16)
    x, gradient = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    stage.forward(0, x, split=False)
    stage.backward(0, gradient)
    with LiveBytes() as live:
        stage.forward(0, x.clone(), split=False)
        fused = live.bytes
        stage.backward(0, gradient)
    assert stage_memory(stage, x, None, gradient, CPU).after_forward >= fused > TENSOR


def test_workspace_is_not_charged_to_later_actions() -> None:
    """W needs nothing, because I has freed everything, and memory of I does not count as W's."""
    stage = Stage(1, 3, nn.Sequential(*(nn.Tanh() for _ in range(6))), 1)
    found = stage_memory(stage, torch.randn(ROWS, WIDTH), None, torch.randn(ROWS, WIDTH), CPU)
    assert found.after_forward == 7 * TENSOR  # the input, and the output of every tanh
    assert found.after_input == 0
    assert TENSOR <= found.workspace <= 3 * TENSOR


def test_measuring_leaves_no_gradients() -> None:
    stage, x = linear_stage()
    first = stage_memory(stage, x, None, torch.randn(ROWS, WIDTH), CPU)
    assert stage_memory(stage, x, None, torch.randn(ROWS, WIDTH), CPU) == first
    assert stage.held == (set(), set())


def test_receives_are_counted_by_channel_without_the_local_boundary() -> None:
    placement = Placement.of("v", 2)  # stages 0 and 3 on rank 0, 1 and 2 on rank 1
    small, large = 40, 400
    first = received_bytes(placement, 0, {0: (small, small), 3: (large, 0)})
    assert first == large  # one channel has the gradient of stage 1 and the activation of stage 2
    second = received_bytes(placement, 1, {1: (small, large), 2: (large, small)})
    assert second == small  # the activation of stage 0 and the gradient of stage 3; the others stay here
    middle = received_bytes(Placement.of("v", 3), 1, {1: (small, large), 4: (large, small)})
    assert middle == large + small  # one channel from rank 2, one from rank 0


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
    hidden = torch.randn(sequences, length, width)
    last = measured(STAGES - 1, Head(width).requires_grad_(False), hidden, characters)
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
