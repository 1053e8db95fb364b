"""Parts of a model: sizes against published formulas and models; what choices and devices add to a part."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.estimates import Document, but, gpt, llama, parts, preset_config
from zbv_models.estimate.model import Transformer
from zbv_models.estimate.model_layers import model_flops, parameters_of
from zbv_models.estimate.part import Held, after_forward, after_input
from zbv_models.estimate.sections import preset, preset_names
from zbv_models.estimate.shapes import Degrees, Parameters, PerAction

GPT = gpt(hidden=64, heads=4, sequence=32, vocabulary=400)
SIZES = st.integers(1, 100)
FOURS = SIZES.map(lambda size: 4 * size)
of_gpts = {"hidden": FOURS, "heads": st.just(4), "sequence": FOURS, "microbatch_size": SIZES}
gpts = st.builds(gpt, **of_gpts, layers=SIZES, vocabulary=SIZES)


def published(tensors: Iterable[Held]) -> int:
    """Bytes after F as the papers count them, without the statistics of norms."""
    return after_forward(held for held in tensors if "statistics" not in held.name)


def block(model: Transformer, t: int = 1, sequence_parallel: bool = False) -> list[Held]:
    halves = parts(model, tensor=t, sequence_parallel=sequence_parallel)
    return [*halves["attention"].tensors, *halves["mlp"].tensors]


@given(gpts, st.sampled_from((1, 2, 4)))
def test_blocks_keep_what_the_table_of_korthikanti_says(model: Transformer, t: int) -> None:
    """Korthikanti et al. 2022, table 2, all six rows."""
    sbh, scores = model.tokens * model.hidden, 5 * model.heads * model.sequence * model.tokens

    def kept(is_sequence_parallel: bool) -> tuple[int, int]:
        """All, and with selective recomputation."""
        held = block(model, t, is_sequence_parallel)
        return published(held), published(each for each in held if "core_attn" not in each.modules)

    assert published(block(model)) == 34 * sbh + scores
    assert kept(False) == (10 * sbh + (24 * sbh + scores) // t, 10 * sbh + 24 * sbh // t)
    assert kept(True) == ((34 * sbh + scores) // t, 34 * sbh // t)
    assert parts(model)["attention"].input_bytes == 2 * sbh


@given(gpts, st.sampled_from(("layernorm", "rmsnorm")), st.booleans(), st.sampled_from((1, 2, 4)))
def test_queued_weight_gradients_read_32_s_b_h(model: Transformer, norm: str, dropout: bool, t: int) -> None:
    """Qi et al. 2023, table 1: inputs and output gradients of four linear layers, whatever is between them.

    Gradients of a sum over the tensor-parallel group stay whole. Sequence parallelism divides inputs.
    """
    model = but(model, norm=norm, dropout=dropout)
    sbh = model.tokens * model.hidden
    assert after_input(block(model, t)) == 8 * sbh + 24 * sbh // t
    assert after_input(block(model, t, True)) == 4 * sbh + 28 * sbh // t


def test_the_ends_keep_tokens_and_logits() -> None:
    """Korthikanti et al. 2022, §4.3: the head keeps 2 s b h twice and 4 s b V, then logits' gradient."""
    model = GPT
    tokens, indices, row = model.tokens, 8 * model.tokens, 2 * 64
    for t in (1, 4):
        head = parts(model, tensor=t, sequence_parallel=t > 1)["head"].tensors
        assert published(head) == tokens * (2 * row + 4 * 400) // t + indices
        assert after_input(head) == tokens * (row + 2 * 400) // t
    plain = parts(but(model, positions="rotary", dropout=False))["embedding"].tensors
    assert (after_forward(plain), after_input(plain)) == (indices, indices + tokens * row)
    learned = parts(model)["embedding"].tensors
    assert after_forward(learned) == indices + 8 * 32 + tokens * 64
    assert after_input(learned) == indices + 8 * 32 + tokens * row + 32 * row


@given(gpts)
def test_operations_and_parameters_are_those_of_the_papers(model: Transformer) -> None:
    """Qi et al. 2023, table 1, of a block; Narayanan et al. 2021, equation 3, of a step that recomputes.

    Equation 2, of parameters: 12 l h² (1 + 13/12h + (V + s)/12lh); plus the final norm, 2h.
    """
    b, s, n, h, v = model.microbatch_size, model.sequence, model.layers, model.hidden, model.vocabulary
    halves = parts(model)
    attention, mlp, head = halves["attention"], halves["mlp"], halves["head"].flops
    flops, parameters = attention.flops + mlp.flops, attention.parameters + mlp.parameters
    assert flops == PerAction(*(s * b * h * (24 * h + scores * s) for scores in (4, 8, 0)))
    step = 96 * b * s * n * h**2 * (1 + s / (6 * h) + v / (16 * n * h))
    assert n * (flops.total + flops.forward) + head.total == pytest.approx(step)
    count = 12 * n * h**2 + 13 * n * h + (v + s) * h + 2 * h
    assert parameters_of(but(model, tied_embeddings=True)).total == count
    assert parameters_of(model).total == count + v * h
    assert parameters == Parameters(shared=12 * h**2 + 7 * h, replicated=6 * h)
    assert parameters.on_device(Degrees(tensor=4)) == (12 * h**2 + 7 * h) // 4 + 6 * h


@pytest.mark.parametrize("change", [{"window": 300}, {"window": 300, "chunked": True}, {}])
@given(s=st.integers(1, 300), w=st.integers(1, 300))
def test_flash_attention_computes_the_pairs_of_its_mask(change: dict[str, object], s: int, w: int) -> None:
    """Counted: the pairs of each query under a causal mask, of which the formula leaves out half a diagonal.

    A mask that is not causal has twice as many. I has 2.5 times the operations of F (Dao 2023, §4.1).
    """
    change = {key: w if key == "window" else value for key, value in change.items()}
    model = llama(hidden=64, heads=4, sequence=s, **change)
    core = parts(model)["attention"].core
    if model.chunked:
        pairs = sum(query % w + 1 for query in range(s)) - s / 2
    else:
        reach = w if model.window else s
        pairs = sum(min(query, reach) for query in range(1, s + 1)) - min(reach, s) / 2
    assert core == PerAction(4 * 64 * pairs, 2.5 * 4 * 64 * pairs)
    assert parts(but(model, causal=False))["attention"].core == core.scaled(2)


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


@pytest.mark.parametrize(("model", "name", "sizes"), [
    # DeepSeek-V2, §2.1: matrices down, up and back. It keeps the stream, its norm, latent vectors twice,
    # queries, keys, values and output. I has three products as wide as keys.
    (but(LATENT, window=None), "attention", {"replicated": 2048 * DOWN + 2048 + 512 + 128,
        "weight_flops": 2 * (MATRICES := 2048 * (DOWN + 768) + 512 * QUERIES + 128 * UP),
        "flops": 2 * MATRICES + 2048 * 16 * 2 * (96 + 48),
        "flops_back": 2 * MATRICES + 2048 * 16 * 2 * (3 * 96 + 2 * 48),
        "after_forward": 2 * (2 * 2048 + 2 * 640 + 2 * QUERIES + 2 * 768) + 3 * 4 + 4 * 16,
        "after_input": 2 * (2048 + 640 + 32 + 128 + UP + 512 + QUERIES + 16 * 48 + 2048)}),
    # Norm and statistic, the router's input, probabilities and map, and tensors of routed tokens.
    (SPARSE, "experts", {"after_forward": 2 * H + 4 + 2 * H + 4 * 16 + 16 + 4 * (2 * H + 2 * 2 * F + 2 * F),
        "after_input": 2 * H + 4 * 16 + 4 * (2 * H + 2 * F + 2 * 2 * F + 2 * H),
        "chosen": 4 * 3 * H * F, "sent": 0}),
    (llama(layers=1, pattern="M", state_space=GIVEN), "state-space", {
        "parameters": 1000, "flops": 2300, "flops_back": 2600, "weight_flops": 2000, "moved": 50,
        "moved_back": 100, "after_forward": 9000, "after_input": 700}),
])  # fmt: skip
def test_a_part_has_the_sizes_of_its_tensors(model: Transformer, name: str, sizes: dict[str, float]) -> None:
    found = sizes_of(model, name)
    assert {key: found[key] for key in sizes} == pytest.approx(sizes)


@pytest.mark.parametrize(("base", "change", "name", "added"), [
    # Two masks, and the softmax after dropout (Korthikanti et al. 2022, §4.1).
    (GPT, {"dropout": False}, "attention", {"after_forward": -64 - 3 * 4 * 32, "after_input": 0}),
    (GPT, {"dropout": False}, "mlp", {"after_forward": -64, "moved": -5 * 64, "moved_back": -5 * 64}),
    # A normaliser of every row and head instead of the softmax (Dao et al. 2022, §3.1).
    (but(GPT, dropout=False), {"attention": "flash"}, "attention", {"after_forward": 4 * 4 - 2 * 4 * 32}),
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
        "flops": 2 * 2048 * 164 + 4 * 32 * 4096, "flops_back": 2 * 2048 * 164 + 2 * 4 * 32 * 4096,
        "moved": 2 * 2 * 160 + 4 * 256}),
    (LATENT, INDEXER, "attention", {"parameters": 512 * 4 * 32 + 2048 * 36 + 2 * 32,
        "weight_flops": 2 * (512 * 128 + 2048 * 36),
        # Scores are as wide as the latent vector and the rotated part; 248 pairs of a token.
        "flops": 2 * (512 * 128 + 2048 * 36) + 4 * 32 * 4096 + 2 * 248 * 16 * (160 + 128 - 96 - 48)}),
    (LATENT, {"q_lora_rank": None}, "attention", {
        "parameters": 16 * 96 * (2048 - 512) - 2048 * 512 - 512, "moved": -4 * 512, "moved_back": -6 * 512}),
    (SPARSE, {"shared_expert_ffn": 2 * F, "shared_expert_gate": True}, "experts", {
        "parameters": 3 * H * 2 * F + H, "flops": 2 * 3 * H * 2 * F, "after_forward": 2 * 3 * 2 * F,
        "after_input": 2 * (3 * 2 * F + H), "moved": 2 * 3 * 2 * F}),
    (SPARSE, {"experts": 32}, "experts", {"moved": 3 * 4 * 16, "moved_back": 3 * 4 * 16}),
    (SPARSE, {"capacity_factor": 1.5}, "experts", {"flops": 0.5 * 4 * 2 * 3 * H * F, "parameters": 0}),
    # Nemotron 3: two more matrices for every token, and experts of a quarter of the width.
    (SPARSE, {"expert_hidden": H // 4}, "experts", {"parameters": 2 * H * H / 4 - 16 * 3 * F * H * 3 / 4,
        "flops": 2 * (2 * H * H / 4 - 4 * 3 * F * H * 3 / 4)}),
    # The loss keeps logits in their own type, and overwrites them.
    (LLAMA, {"fused_loss": True}, "head", {
        "after_forward": -2 * 32000, "moved": (3 - 19) * 2 * 32000, "moved_back": (2 - 7) * 2 * 32000}),
    # DeepSeek-V3, §2.2: the head computes the logits of every prediction with the same matrix.
    (LLAMA, {"prediction_layers": 1}, "head", {"parameters": 0, "flops": 2 * 4096 * 32000}),
    (LLAMA, {"positions": "learned"}, "embedding", {"parameters": 4096**2, "moved": 2 * 2 * 4096}),
])  # fmt: skip
def test_choices_add(base: Transformer, change: Document, name: str, added: dict[str, float]) -> None:
    before, after = sizes_of(base, name), sizes_of(but(base, **change), name)
    assert {key: after[key] - before[key] for key in added} == pytest.approx(added)


@pytest.mark.parametrize(("model", "name", "before", "more", "added"), [
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
    (but(LATENT, **INDEXER), "attention", {"context": 2}, {"tensor": 4}, {"sent": 2 * 3 / 4 * 4096 / 2}),
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
        "moved": 2 * 2 * 2 * 4 * H, "flops": 0, "rows": 2 * 4 / 16 * (4 - 1), "sent": 2 * 2 * 4 * H * 3 / 4,
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
])  # fmt: skip
def test_devices_add(
    model: Transformer, name: str, before: Document, more: Document, added: Document
) -> None:
    first, then = sizes_of(model, name, **before), sizes_of(model, name, **before, **more)
    assert {key: then[key] - first[key] for key in added} == pytest.approx(added)


@pytest.mark.parametrize("name", [name for name in preset_names() if preset(name).model])
def test_presets_have_the_published_parameters_and_6_operations_for_each(name: str) -> None:
    """Per token, without tables and scores (Kaplan et al. 2020, §2.1): with a window of one there are none.

    GPT-3's 3.14e23 are counted so (Brown et al. 2020, table D.1), and 3.8e25 of Llama 3.1 405B.
    """
    published, model = preset(name).published, preset_config(name).model
    without = but(model, prediction_layers=0)
    count, tables = parameters_of(without), model.vocabulary * model.stream.hidden
    counted = {
        None: parameters_of(model).total,
        "one vocabulary matrix": count.total - tables,
        "without predictions": count.total,
    }[published.get("parameters_counted")]
    assert counted == pytest.approx(published["parameters"], rel=0, abs=published.get("parameters_within", 0))
    if "without_embeddings" in published:
        within = published["without_embeddings_within"]
        assert count.total - 2 * tables == pytest.approx(published["without_embeddings"], rel=0, abs=within)
    sparse = model.experts is not None
    assert sparse == ("active" in published)
    if sparse:
        assert count.active == pytest.approx(published["active"], rel=0, abs=published["active_within"])
    if "predictions" in published:
        assert parameters_of(model).total - count.total == pytest.approx(published["predictions"], rel=0.01)
    positions = model.sequence * model.hidden if model.positions == "learned" else 0
    left_out = positions + (0 if model.tied_embeddings else tables)  # a tied table is the head's, too
    operations = model_flops(but(without, window=1, attention="flash"))
    assert operations == pytest.approx(6 * without.sequence * (count.active - left_out), rel=5e-4)
    if "gflop_per_token" in published:  # with the scores
        sequence = published["gflop_per_token_at"]
        operations = model_flops(but(without, sequence=sequence)) / sequence / 1e9
        assert operations == pytest.approx(published["gflop_per_token"], rel=2e-3)
