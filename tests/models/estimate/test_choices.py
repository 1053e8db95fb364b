"""What a choice of a model, or more devices, add to a part: parameters, and per token all other sizes."""

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
GIVEN = {"parameters": 1000, "flops": 2000.0, "core_flops": 300.0, "memory_traffic": 50.0,
         "after_forward": 9000.0, "after_input": 700.0}  # fmt: skip


DOWN, UP, QUERIES = 512 + 128 + 32, 16 * (64 + 48), 16 * (64 + 32)
"""Widths of LATENT's projections down and up, and of its queries."""
SP = {"tensor": 4, "sequence_parallel": True}
NODES = {"expert": 8, "expert_in_node": 2, "data": 8}


def sizes_of(model: Transformer, name: str, **degrees: Any) -> dict[str, float]:
    part = parts(model, **degrees)[name]
    per_token = {
        "workspace": part.workspace,
        "flops": part.flops.forward,
        "flops_back": part.flops.backward_input,
        "weight_flops": part.flops.backward_weight,
        "moved": part.moved.forward + part.streamed.forward,
        "moved_back": part.moved.backward_input + part.streamed.backward_input,
        "after_forward": part.after_forward,
        "after_input": part.after_input,
        "in_node": sum(each.sent.forward for each in part.exchanges if each.group == "expert_in_node"),
        "rows": sum(product.rows for product in part.products),
    }
    for key, action in (("", "forward"), ("_back", "backward_input"), ("_weight", "backward_weight")):
        per_token[f"sent{key}"] = sum(getattr(each.sent, action) for each in part.exchanges)
        per_token[f"calls{key}"] = model.tokens * sum(getattr(each.calls, action) for each in part.exchanges)
    count = part.parameters
    whole = {"parameters": count.total, "replicated": count.replicated, "chosen": count.chosen}
    return whole | {key: size / model.tokens for key, size in per_token.items()}


@pytest.mark.parametrize(
    ("model", "name", "sizes"),
    [
        # DeepSeek-V2, §2.1: matrices down, up and back, a norm of each latent vector. It keeps the stream,
        # its norm, latent vectors twice, queries, keys, values and output. I has three products as wide as
        # keys.
        (but(LATENT, window=None), "attention", {
            "parameters": 2048 * DOWN + 512 * QUERIES + 128 * UP + 16 * 48 * 2048 + 2048 + 512 + 128,
            "replicated": 2048 * DOWN + 2048 + 512 + 128,
            "weight_flops": 2 * (MATRICES := 2048 * (DOWN + 768) + 512 * QUERIES + 128 * UP),
            "flops": 2 * MATRICES + 2048 * 16 * 2 * (96 + 48),
            "flops_back": 2 * MATRICES + 2048 * 16 * 2 * (3 * 96 + 2 * 48),
            "after_forward": 2 * (2 * 2048 + 2 * 640 + 2 * QUERIES + 2 * 768) + 3 * 4 + 4 * 16,
            "after_input": 2 * (2048 + 640 + 32 + 128 + UP + 512 + QUERIES + 16 * 48 + 2048)}),
        # Norm and statistic, the router's input, probabilities and map, and tensors of routed tokens.
        (SPARSE, "experts", {
            "after_forward": 2 * H + 4 + 2 * H + 4 * 16 + 16 + 4 * (2 * H + 2 * 2 * F + 2 * F),
            "after_input": 2 * H + 4 * 16 + 4 * (2 * H + 2 * F + 2 * 2 * F + 2 * H),
            "chosen": 4 * 3 * H * F, "sent": 0}),
        (llama(layers=1, pattern="M", state_space=GIVEN), "state-space", {
            "parameters": 1000, "flops": 2300, "flops_back": 2600, "weight_flops": 2000, "moved": 50,
            "moved_back": 100, "after_forward": 9000, "after_input": 700}),
    ],
)  # fmt: skip
def test_a_part_has_the_sizes_of_its_tensors(model: Transformer, name: str, sizes: dict[str, float]) -> None:
    found = sizes_of(model, name)
    assert {key: found[key] for key in sizes} == pytest.approx(sizes)


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
        # Every device projects down: all tokens, or with sequence parallelism its own. Then latent vectors
        # are gathered instead of the stream, and again before W; otherwise their gradients are summed.
        (LATENT, "attention", {}, SP, {
            "parameters": 0, "weight_flops": -3 / 4 * 2 * (2048 * (DOWN + 768) + 512 * QUERIES + 128 * UP),
            "sent": 3 / 4 * 2 * (DOWN + 2048), "sent_back": 3 / 4 * 2 * (DOWN + 2048),
            "sent_weight": 3 / 4 * 2 * DOWN, "calls": 2, "calls_back": 2, "calls_weight": 1}),
        (LATENT, "attention", {}, {"tensor": 4}, {
            "weight_flops": -3 / 4 * 2 * (2048 * 768 + 512 * QUERIES + 128 * UP),
            "sent": 3 / 4 * 2 * 2 * 2048, "sent_back": 3 / 4 * 2 * 2 * DOWN, "calls": 1, "calls_back": 1}),
        # Latent keys are those of all heads, so every device of a group sends them.
        (but(LATENT, **INDEXER), "attention", {"context": 2}, {"tensor": 4}, {
            "sent": 2 * 3 / 4 * 4096 / 2}),
        # Early and late pieces make equal work. A device sends its quarter of keys and values to three
        # others, and in I with gradients: around a ring, or gathered at once.
        *((LLAMA, "attention", {}, {"context": 4, "gathers_context": gathers}, {
            "parameters": 0, "flops": -3 / 4 * (2 * 4096 * (4096 + 6144) + 2 * 4096 * 4096),
            "after_forward": -3 / 4 * (2 * (4 * 4096 + 2 * 1024) + 4 + 4 * 32), "sent": 3 / 4 * 2 * 2048,
            "sent_back": 3 / 2 * 2 * 2048, "sent_weight": 0, "calls": calls, "calls_back": calls_back})
          for gathers, calls, calls_back in ((False, 3, 3), (True, 1, 2))),
        # A ring holds two pieces of keys and values with their gradients, and an all-gather all four.
        (LLAMA, "attention", {"context": 4}, {"gathers_context": True}, {"workspace": 2 * 2 * 1024}),
        # Tokens are copied once more after they arrive, and before they return. k copies of each are sent to
        # the 3 of 4 devices with other experts, and back, in F and in I.
        (SPARSE, "experts", {"data": 4}, {"expert": 4}, {
            "moved": 2 * 2 * 2 * 4 * H, "flops": 0, "rows": 2 * 4 / 16 * (4 - 1),
            "sent": 2 * 2 * 4 * H * 3 / 4,
            "sent_back": 2 * 2 * 4 * H * 3 / 4, "sent_weight": 0, "calls": 2, "calls_back": 2}),
        (SPARSE, "experts", {"data": 16}, {"expert": 16}, {"moved": 0}),  # one expert each is not sorted
        (but(SPARSE, expert_hidden=H // 4), "experts", {"data": 4}, {"expert": 4}, {
            "sent": 2 * 2 * 4 * H / 4 * 3 / 4}),
        (SPARSE, "experts", {"expert": 4, "data": 4}, {"tensor": 2, "sequence_parallel": True}, {
            "sent": -2 * 2 * 4 * H * 3 / 4 / 2}),
        # Four nodes of two devices: a token with four experts is on 4 (1 - (3/4)⁴) of them, to each of which
        # it is sent once, and copied there; or on one of them at most; or all devices are on one node.
        (SPARSE, "experts", {}, NODES, {
            "sent": 2 * 2 * H * (4 * (1 - 0.75**4) * 3 / 4 + 4 / 2), "in_node": 2 * 2 * H * 4 / 2}),
        (but(SPARSE, expert_nodes=1), "experts", {}, NODES, {"sent": 2 * 2 * H * (3 / 4 + 4 / 2)}),
        (SPARSE, "experts", {}, {**NODES, "expert_in_node": 8}, {
            "sent": 2 * 2 * 4 * H * 7 / 8, "in_node": 2 * 2 * 4 * H * 7 / 8}),
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
