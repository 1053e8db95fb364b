"""Muon's products against torch's count of the iteration, and how devices share them."""

from __future__ import annotations

from typing import Any

import pytest
from support.estimates import but, estimate_config, llama
from zbv_models.estimate.config import estimate_layers
from zbv_models.estimate.model import Transformer

torch = pytest.importorskip("torch")
FAST = {
    "tensor_parallel_bandwidth": 1e12,
    "tensor_parallel_latency": 0.0,
    "tensor_parallel_step_latency": 0.0,
}
SIZES: dict[str, Any] = {"hidden": 256, "heads": 8, "kv_heads": 2, "ffn": 640, "vocabulary": 512, "layers": 1}
MATRICES = [(256, 256), (64, 256), (64, 256), (256, 256), (640, 256), (640, 256), (256, 640)]
EXPERTS = {"experts": 8, "experts_per_token": 2, "expert_ffn": 128}
OF_EXPERTS = [*MATRICES[:4], *[(128, 256), (128, 256), (256, 128)] * 8]


def counted(matrices: list[tuple[int, int]]) -> int:
    """Operations of five Newton-Schulz steps (Jordan et al. 2024), of the side that is shorter."""
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        for rows, columns in matrices:
            update = torch.empty(min(rows, columns), max(rows, columns))
            for _ in range(5):
                gram = update @ update.T
                update = 2.0 * update + (gram + gram @ gram) @ update
    found: int = counter.get_total_flops()
    return found


def products(
    model: Transformer, name: str = "block", of_device: dict[str, float] | None = None, **parallel: Any
) -> float:
    """Operations of the optimizer of a layer, on a device whose memory and links take no time."""
    config = estimate_config(model, optimizer="muon", **parallel)
    times = {"kernel_latency": None, "memory_bandwidth": None, "product_bandwidth": None}
    config = but(config, device=but(config.device, achieved_tflops=1.0, **times, **(of_device or FAST)))
    return 1e6 * sum(each.step.optimizer for each in estimate_layers(config) if each.name == name)


def test_a_block_has_the_products_of_every_matrix() -> None:
    assert products(llama(**SIZES)) == pytest.approx(counted(MATRICES))
    sparse = llama(**SIZES, **EXPERTS)
    assert products(sparse, "moe") == pytest.approx(counted([*OF_EXPERTS]), rel=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_tables_have_none_wherever_they_are(tied: bool) -> None:
    model = llama(**SIZES, tied_embeddings=tied)
    assert products(model, "head") == products(model, "embedding") == 0


def test_replicas_that_share_the_optimizer_share_the_matrices() -> None:
    """A tensor-parallel group computes whole matrices; experts have other replicas."""
    whole = counted(MATRICES)
    dense, sparse = llama(**SIZES), llama(**SIZES, **EXPERTS)
    shared: list[tuple[dict[str, Any], int]] = [
        ({"data_parallel": 4}, 1),
        ({"data_parallel": 4, "zero_stage": 1}, 4),
        ({"data_parallel": 2, "context_parallel": 2, "zero_stage": 1}, 4),
        ({"tensor_parallel": 2}, 1),
        ({"tensor_parallel": 2, "data_parallel": 4, "zero_stage": 2}, 4),
    ]
    for parallel, share in shared:
        assert products(dense, **parallel) == pytest.approx(whole / share)
    attention, experts = counted(OF_EXPERTS[:4]), counted(OF_EXPERTS[4:])
    found = products(sparse, "moe", data_parallel=4, expert_parallel=4, zero_stage=1)
    assert found == pytest.approx(attention / 4 + experts / 4, rel=1e-6)


def test_of_a_frozen_model_adapters_alone_are_orthogonalized() -> None:
    model = llama(**SIZES, lora_rank=4, target_modules=["q_proj", "down_proj"])
    adapters = [(4, 256), (256, 4), (4, 640), (256, 4)]
    assert products(model) == pytest.approx(counted(adapters))


@pytest.mark.parametrize("stage", [0, 1])
def test_a_tensor_parallel_group_gathers_the_matrices_that_it_divides(stage: int) -> None:
    """In float32, once per step (Megatron-LM, ``newton_schulz_tp``); replicas share that, too.

    Nothing divides routed experts, and adapters are left out.
    """
    link = dict(zip(FAST, (1.0, 10.0, 1.0), strict=True))
    degrees: dict[str, Any] = {"tensor_parallel": 4, "data_parallel": 2, "zero_stage": stage}
    replicas = 2 if stage else 1

    def gathering(model: Transformer, name: str = "block") -> float:
        slow, fast = (products(model, name, device, **degrees) for device in (link, FAST))
        return (slow - fast) * replicas / 1e6

    def expected(matrices: list[tuple[int, int]]) -> float:
        return sum(4 * rows * columns * 3 / 4 / 1e3 + 10 + 3 for rows, columns in matrices)

    sizes = {**SIZES, "kv_heads": 4}
    matrices = [(256, 256), (128, 256), (128, 256), (256, 256), (640, 256), (640, 256), (256, 640)]
    assert gathering(llama(**sizes)) == pytest.approx(expected(matrices))
    degrees["sequence_parallel"] = True
    assert gathering(llama(**sizes, **EXPERTS), "moe") == pytest.approx(expected(matrices[:4]))
    assert gathering(llama(**sizes, lora_rank=4)) == pytest.approx(0.0, abs=1e-6)
