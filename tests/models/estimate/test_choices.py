"""What each choice of a model adds to a part: parameters, and per token operations, traffic and memory."""

from __future__ import annotations

from typing import Any

import pytest
from support.estimates import but, gpt, llama, parts
from zbv_models.estimate.model import Transformer

GPT = gpt(hidden=64, heads=4, sequence=32, vocabulary=400)
PLAIN = but(GPT, dropout=False)
LLAMA = llama(kv_heads=8)
H, F = 1024, 512
SPARSE = llama(hidden=H, layers=4, heads=8, experts=16, experts_per_token=4, expert_ffn=F)
NEAR = llama(hidden=2048, heads=16, window=256)
LATENT = llama(
    **{"hidden": 2048, "heads": 16, "q_lora_rank": 512, "kv_lora_rank": 128, "qk_nope_head_dim": 64},
    **{"qk_rope_head_dim": 32, "v_head_dim": 48, "window": 256},
)
INDEXER = {"index_heads": 4, "index_dim": 32}


def sizes_of(model: Transformer, name: str, **degrees: Any) -> dict[str, float]:
    part = parts(model, **degrees)[name]
    per_token = {
        "workspace": part.workspace,
        "sent": sum(each.sent.forward for each in part.exchanges),
        "sent_back": sum(each.sent.backward_input for each in part.exchanges),
        "flops": part.flops.forward,
        "weight_flops": part.flops.backward_weight,
        "moved": part.moved.forward + part.streamed.forward,
        "moved_back": part.moved.backward_input + part.streamed.backward_input,
        "after_forward": part.after_forward,
        "after_input": part.after_input,
    }
    return {"parameters": part.parameters.total} | {
        key: size / model.tokens for key, size in per_token.items()
    }


@pytest.mark.parametrize(
    ("base", "change", "name", "added"),
    [
        # Two masks, and the softmax after dropout (Korthikanti et al. 2022, §4.1).
        (GPT, {"dropout": False}, "attention", {"after_forward": -64 - 3 * 4 * 32, "after_input": 0}),
        (GPT, {"dropout": False}, "mlp", {"after_forward": -64, "moved": -5 * 64, "moved_back": -5 * 64}),
        # A normaliser of every row and head instead of the softmax (Dao et al. 2022, §3.1).
        (PLAIN, {"attention": "flash"}, "attention", {"after_forward": 4 * 4 - 2 * 4 * 32}),
        (GPT, {"norm": "rmsnorm"}, "attention", {"parameters": -64, "after_forward": -4}),
        (LLAMA, {"qkv_bias": True}, "attention", {"parameters": 4096 + 2 * 1024, "flops": 0}),
        (LLAMA, {"positions": "none"}, "attention", {"moved": -2 * 2 * (4096 + 1024), "parameters": 0}),
        (LLAMA, {"qk_norm": True}, "attention", {
            "parameters": 2 * 128, "after_forward": 2 * 5120 + 4 * 40, "moved": 4 * 5120,
            "moved_back": 6 * 5120}),
        # Qwen3-Next: the gate's product is part of that to queries, and it is kept as the heads' output is.
        (LLAMA, {"output_gate": True}, "attention", {
            "parameters": 4096**2, "flops": 2 * 4096**2, "after_forward": 4 * 4096, "moved": 6 * 4096}),
        # Gemma 2, §2: a norm of what each half gives.
        *((LLAMA, {"post_norms": True}, name, {
            "parameters": 4096, "after_forward": 2 * 4096 + 4, "moved": 4 * 4096, "moved_back": 6 * 4096})
          for name in ("attention", "mlp")),
        (LLAMA, {"fused_activation": False}, "mlp", {"after_forward": 2 * 16384, "moved": 4 * 16384}),
        (LLAMA, {"gated": False}, "mlp", {
            "parameters": -(4096 * 16384), "flops": -2 * 4096 * 16384, "after_forward": -2 * 16384,
            "moved": -2 * 16384, "moved_back": -4 * 16384}),
        *((LLAMA, {"product_dtype": "fp8"}, name, {"flops": 0, "after_input": -waiting / 2})
          for name, waiting in (("attention", 2 * (6144 + 3 * 4096)), ("mlp", 2 * (3 * 16384 + 2 * 4096)))),
        # DeepSeek-V3.2, §2.1: queries from the latent vector; keys that heads share; scores are not kept.
        (NEAR, INDEXER, "attention", {
            "parameters": 2048 * (4 * 32 + 36) + 2 * 32, "after_forward": 2 * 164 + 4 * 256,
            "after_input": 2 * 164, "weight_flops": 2 * 2048 * 164,
            "flops": 2 * 2048 * 164 + 4 * 32 * 4096, "moved": 2 * 2 * 160 + 4 * 256}),
        (LATENT, INDEXER, "attention", {
            "parameters": 512 * 4 * 32 + 2048 * 36 + 2 * 32,
            "weight_flops": 2 * (512 * 128 + 2048 * 36),
            # Scores are as wide as the latent vector and the rotated part; 248 pairs of a token.
            "flops": 2 * (512 * 128 + 2048 * 36) + 4 * 32 * 4096 + 2 * 248 * 16 * (160 + 128 - 96 - 48)}),
        (LATENT, {"q_lora_rank": None}, "attention", {
            "parameters": 16 * 96 * (2048 - 512) - 2048 * 512 - 512, "moved": -4 * 512,
            "moved_back": -6 * 512}),
        (SPARSE, {"shared_expert_ffn": 2 * F, "shared_expert_gate": True}, "experts", {
            "parameters": 3 * H * 2 * F + H, "flops": 2 * 3 * H * 2 * F, "after_forward": 2 * 3 * 2 * F,
            "after_input": 2 * (3 * 2 * F + H), "moved": 2 * 3 * 2 * F}),
        (SPARSE, {"capacity_factor": 1.5}, "experts", {"flops": 0.5 * 4 * 2 * 3 * H * F, "parameters": 0}),
        # Nemotron 3: two more matrices for every token, and experts of a quarter of the width.
        (SPARSE, {"expert_hidden": H // 4}, "experts", {
            "parameters": 2 * H * H / 4 - 16 * 3 * F * H * 3 / 4,
            "flops": 2 * (2 * H * H / 4 - 4 * 3 * F * H * 3 / 4)}),
        # The loss keeps logits in their own type, and overwrites them.
        (LLAMA, {"fused_loss": True}, "head", {
            "after_forward": -2 * 32000, "moved": (3 - 19) * 2 * 32000, "moved_back": (2 - 7) * 2 * 32000}),
        # DeepSeek-V3, §2.2: the head computes the logits of every prediction with the same matrix.
        (LLAMA, {"prediction_layers": 1}, "head", {"parameters": 0, "flops": 2 * 4096 * 32000}),
        (LLAMA, {"positions": "learned"}, "embedding", {"parameters": 4096**2, "moved": 2 * 2 * 4096}),
    ],
)  # fmt: skip
def test_a_choice_adds_what_it_needs(
    base: Transformer, change: dict[str, Any], name: str, added: dict[str, float]
) -> None:
    before, after = sizes_of(base, name), sizes_of(but(base, **change), name)
    assert {key: after[key] - before[key] for key in added} == pytest.approx(added)


@pytest.mark.parametrize(
    ("model", "name", "before", "more", "added"),
    [
        # The stream stays whole.
        (LLAMA, "attention", {}, {"tensor": 4}, {"after_forward": -3 / 4 * (4 * (4096 + 1024) + 4 * 32)}),
        # Latent keys are those of all heads, so every device of a group sends them.
        (but(LATENT, **INDEXER), "attention", {"context": 2}, {"tensor": 4}, {
            "sent": 2 * 3 / 4 * 4096 / 2}),
        # A ring holds two pieces of keys and values with their gradients, and an all-gather all four.
        (LLAMA, "attention", {"context": 4}, {"gathers_context": True}, {"workspace": 2 * 2 * 1024}),
        # Tokens are copied once more after they arrive, and before they return.
        (SPARSE, "experts", {"data": 4}, {"expert": 4}, {"moved": 2 * 2 * 2 * 4 * H}),
        # torchtitan's gate and first matrix are apart, so each computes a gradient of the stream.
        (llama(ffn=2048), "mlp", {"tensor": 2, "sequence_parallel": True}, {"keeps_gathered": True}, {
            "workspace": 2 * (8192 + 2048) - (8192 + 3 * 2048), "after_forward": 8192 / 2}),
        # Columns of the output are joined, and rows of tokens are summed.
        (llama(prediction_layers=1), "joining", {}, {"tensor": 2}, {
            "sent": 3 / 2 * 8192, "sent_back": 4 / 2 * 8192}),
    ],
)  # fmt: skip
def test_devices_divide_what_they_share(
    model: Transformer, name: str, before: dict[str, Any], more: dict[str, Any], added: dict[str, float]
) -> None:
    first, then = sizes_of(model, name, **before), sizes_of(model, name, **before, **more)
    assert {key: then[key] - first[key] for key in added} == pytest.approx(added)
