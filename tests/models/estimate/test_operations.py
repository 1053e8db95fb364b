"""Operations of F against those that torch counts in transformers' own models, with all scores computed."""

from __future__ import annotations

from typing import Any

import pytest
from models.estimate.test_transformers import SMALL, as_file, fields, made
from zbv_models.estimate.model import Transformer
from zbv_models.estimate.model_layers import layer_kinds, shapes_of
from zbv_models.estimate.shapes import Degrees
from zbv_models.estimate.transformers_config import from_transformers

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
SEQUENCE = 128
TYPES = (
    "afmoe apertus deepseek_v3 deepseek_v32 deepseek_v4 dots1 ernie4_5_moe exaone4 gemma gemma2 gemma3_text "
    "gemma4_text gpt_neox gpt_oss granitemoeshared hy_v3 laguna llama mimo_v2_flash minimax_m2 "
    "minimax_m3_vl_text mistral mixtral nemotron olmoe phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe solar_open"
)
"""All that the worker trains, and one or more for each formula of attention and of experts."""
SIZES: dict[str, Any] = {
    **SMALL, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "vocab_size": 128,
    "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "q_lora_rank": 32, "kv_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "num_experts": 8, "n_routed_experts": 8,
    "num_local_experts": 8, "num_experts_per_tok": 2, "topk_group": 1, "n_group": 1, "index_n_heads": 2,
    "index_head_dim": 16, "o_lora_rank": 16, "o_groups": 2, "sliding_window": 16,
}  # fmt: skip
RECURRENT = "bailing_hybrid bamba jamba kimi_linear lfm2_moe minimax nemotron_h olmo_hybrid qwen3_5_text"
"""Types with layers of given costs, whose recurrence transformers computes by tokens, or in other chunks."""
LATENT = {"num_key_value_heads": 4}


def counted_by_torch(name: str) -> tuple[Any, dict[str, int]]:
    """A small file of a type, and operations of a forward by names of torch's functions.

    Experts get as many tokens as the router sends them.
    """
    from torch.utils.flop_counter import FlopCounterMode

    config = made(name, **{**SIZES, **(LATENT if "kv_lora_rank" in fields(name) else {})})
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    tokens = torch.ones((1, SEQUENCE), dtype=torch.long)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=tokens, use_cache=False)
    found = counter.get_flop_counts()["Global"]
    return as_file(config), {str(function): int(count) for function, count in found.items()}


def counted(document: Any, *, with_scores: bool = True) -> float:
    read = {"sequence": SEQUENCE, "attention": "plain", "causal": False, **from_transformers(document)}
    model = Transformer.model_validate({**read, "prediction_layers": 0})
    total, n = 0.0, model.residual_streams
    for kind in layer_kinds(model):
        for _, half in kind.halves:
            part = half.part(shapes_of(model, kind, Degrees()))
            products = sum(product.flops for product in part.products)
            total += kind.count * (products + (part.core.forward if with_scores else 0))
    # The mix of streams is a product in transformers; zbv counts its memory traffic.
    return total + (2 * model.layers * 2 * SEQUENCE * n * n * model.hidden if n > 1 else 0)


LEFT_OUT = {"deepseek_v32": 0.005, "qwen2_moe": 1e-4}
"""Weights of the indexer's heads, and a gate of one value per token."""


@pytest.mark.parametrize("name", TYPES.split())
def test_a_forward_has_the_operations_that_torch_counts(name: str) -> None:
    document, by_function = counted_by_torch(name)
    expected = sum(by_function.values())
    assert counted(document) == pytest.approx(expected, rel=LEFT_OUT.get(name, 1e-9))


@pytest.mark.parametrize("name", RECURRENT.split())
def test_layers_without_attention_have_the_products_with_weights_that_torch_counts(name: str) -> None:
    document, by_function = counted_by_torch(name)
    expected = by_function["aten.mm"] + by_function.get("aten.addmm", 0)
    assert counted(document, with_scores=False) == pytest.approx(expected, rel=1e-9)
