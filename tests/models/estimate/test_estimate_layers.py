"""Estimated layers: properties of every estimate, and measured times."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.estimates import but, estimate_config, estimate_configs, gpt, llama, preset_config
from zbv_models.estimate.config import EstimateConfig, estimate_layers, problem_document
from zbv_models.estimate.device import Device
from zbv_models.estimate.layers import LayerEstimate, Running
from zbv_models.estimate.model import Transformer
from zbv_models.estimate.sections import preset
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.reading import parse_any_problem

ZERO_BUBBLE = ("gpt-1.5b", "gpt-6.2b", "gpt-14.6b", "gpt-28.3b")


def changed(config: EstimateConfig, **parallel: Any) -> EstimateConfig:
    return but(config, parallel=but(config.parallel, **parallel))


def on_device(config: EstimateConfig, **device: Any) -> EstimateConfig:
    return but(config, device=but(config.device, **device))


def block_of(config: EstimateConfig) -> LayerEstimate:
    (block,) = (layer for layer in estimate_layers(config) if layer.name == "block")
    return block


@given(estimate_configs())
def test_every_estimate_is_a_problem_that_the_planner_accepts(config: EstimateConfig) -> None:
    document = problem_document(config)
    # A model of one block has too few layers for the stages, which is not the estimate's concern.
    problem = parse_any_problem({**document, "cut": {**document.get("cut", {}), "allow_empty": True}})
    assert isinstance(problem, LayeredProblem)
    halves = 2 if config.parallel.granularity == "half" else 1
    assert problem.model.n_layers == 2 + halves * config.model.layers
    assert problem.model.can_recompute == (config.recompute != "none")


@given(estimate_configs(granularity="half"))
def test_a_block_is_the_sum_of_its_halves(config: EstimateConfig) -> None:
    block = block_of(changed(config, granularity="block"))
    halves = estimate_layers(config)[1:3]
    assert [half.name for half in halves] == ["block.0.attention", "block.0.mlp"]
    first, second = halves
    assert block.flops == first.flops + second.flops
    assert block.static == first.static + second.static
    assert block.parameters == first.parameters + second.parameters
    assert block.plain.times == first.plain.times + second.plain.times
    for held in ("after_forward", "after_input"):
        assert getattr(block.plain, held) == getattr(first.plain, held) + getattr(second.plain, held)
    largest = max(first.plain.workspace, second.plain.workspace)
    if config.parallel.zero_stage < 2 or config.parallel.data_parallel == 1:
        assert block.plain.workspace == largest
    else:  # replicas gather and reduce a whole block at once
        assert largest <= block.plain.workspace <= first.plain.workspace + second.plain.workspace
    assert block.output_bytes == first.output_bytes == second.output_bytes


@given(estimate_configs(tensor_parallel=1), st.sampled_from((2, 4)), st.booleans())
def test_tensor_parallelism_divides_work_and_adds_none(
    config: EstimateConfig, degree: int, sequence_parallel: bool
) -> None:
    model = config.model
    sizes = {name: 4 * getattr(model, name) for name in ("heads", "vocabulary", "sequence")}
    sizes |= {"kv_heads": 4 * model.n_kv_heads, "ffn": 4 * model.ffn_width, "head_dim": model.width_of_head}
    alone = but(config, model=but(model, **sizes))
    shared = changed(alone, tensor_parallel=degree, sequence_parallel=sequence_parallel)
    for whole, part in zip(estimate_layers(alone), estimate_layers(shared), strict=True):
        assert part.flops.total * degree == pytest.approx(whole.flops.total)
        assert whole.parameters / degree <= part.parameters <= whole.parameters
        assert whole.plain.after_forward / degree <= part.plain.after_forward <= whole.plain.after_forward
        assert part.plain.after_input <= whole.plain.after_input
    size = 1 if not sequence_parallel else degree
    assert estimate_layers(alone)[0].output_bytes == size * estimate_layers(shared)[0].output_bytes


def but_workspace(running: Running) -> Running:
    return replace(running, workspace=0)


@given(estimate_configs())
def test_replicas_share_only_static_memory_and_more_in_higher_stages_of_zero(config: EstimateConfig) -> None:
    stages = [estimate_layers(changed(config, zero_stage=stage)) for stage in range(4)]
    for layers in zip(*stages, strict=True):
        sizes = [layer.static.total for layer in layers]
        assert sizes == sorted(sizes, reverse=True)
        plain = [but_workspace(layer.plain) for layer in layers]
        assert plain == [plain[0]] * 4
        assert layers[0].plain == layers[1].plain
    alone = estimate_layers(changed(config, data_parallel=1))
    assert alone == estimate_layers(changed(config, data_parallel=1, zero_stage=0))


@given(estimate_configs(recompute="full"))
def test_full_recomputation_keeps_only_the_input_and_adds_a_forward(config: EstimateConfig) -> None:
    for layer in estimate_layers(config):
        if layer.full is None:
            assert layer.name in ("embedding", "head")
            continue
        plain, again = layer.plain, layer.full
        assert again.times.forward == plain.times.forward
        assert again.times.backward_input == pytest.approx(plain.times.backward_input + plain.times.forward)
        assert again.times.backward_weight == plain.times.backward_weight
        assert again.after_forward == layer.output_bytes  # the input is as large
        assert again.after_input == plain.after_input
        assert again.workspace - plain.workspace == plain.after_forward - again.after_forward


def test_selective_recomputation_drops_scores_and_computes_them_again() -> None:
    """Korthikanti et al. 2022, §5: 34 s b h remain."""
    config = estimate_config(gpt(), recompute="selective", granularity="half")
    attention, mlp = estimate_layers(config)[1:3]
    assert mlp.selective is None
    assert attention.selective is not None
    model = config.model
    scores = 5 * model.heads * model.sequence * model.tokens
    assert attention.plain.after_forward - attention.selective.after_forward == scores
    assert attention.selective.workspace - attention.plain.workspace == scores
    block = block_of(changed(config, granularity="block"))
    assert block.selective is not None
    statistics = 2 * 8 * model.tokens
    assert block.selective.after_forward == 34 * model.tokens * model.hidden + statistics
    added = block.selective.times.backward_input - block.plain.times.backward_input
    score_flops = 4 * model.tokens * model.sequence * model.hidden
    moved = 4.5 * 2 * model.heads * model.sequence * model.tokens
    assert added == pytest.approx(1e6 * (score_flops / 100e12 + moved / 1000e9))


@pytest.mark.parametrize("device", [None, "a100"])
@pytest.mark.parametrize("name", ZERO_BUBBLE)
def test_times_match_the_profile_of_the_zero_bubble_paper(name: str, device: str | None) -> None:
    """Qi et al. 2023, table 9: four models, one device; each of F, I, W within 13 %, their sum within 5 %."""
    config, measured = preset_config(name), preset(name).published
    if device is not None:
        config = but(config, device=Device.model_validate(preset(device).device))
    times, blocks = block_of(config).plain.times, measured["stage_layers"]
    found, profiled = {}, measured["profiled_ms"]
    for action in ("forward", "backward_input", "backward_weight"):
        found[action] = blocks * getattr(times, action) / 1e3
        assert found[action] == pytest.approx(profiled[action], rel=0.13)
    assert sum(found.values()) == pytest.approx(sum(profiled[action] for action in found), rel=0.05)
    if device is not None:
        return
    problem = parse_any_problem(problem_document(config))
    assert isinstance(problem, LayeredProblem)
    assert problem.link is not None
    transfer = problem.link.latency + block_of(config).output_bytes / problem.link.bandwidth
    assert transfer / 1e3 == pytest.approx(profiled["p2p"], rel=0.08)


def test_collectives_take_the_time_of_a_ring_and_can_be_hidden() -> None:
    """An all-reduce in each half is 2 (t - 1) / t of the residual stream, at 100 GB/s after 5 us."""
    config = on_device(estimate_config(llama(), tensor_parallel=4), memory_bandwidth=None)
    size = 2 * 4096 * 4096
    ring = size * 3 / 4 / 100e9 * 1e6

    def exposed(**parallel: Any) -> Running:
        return block_of(changed(config, **parallel)).plain

    def compute(action: str) -> float:
        return float(getattr(block_of(config).flops, action)) / 100e12 * 1e6

    for action, passes, calls in (("forward", 4, 2), ("backward_input", 4, 2), ("backward_weight", 0, 0)):
        found = getattr(exposed().times, action)
        assert found == pytest.approx(compute(action) + passes * ring + calls * 5)
    for action, passes in (("forward", 4), ("backward_input", 4), ("backward_weight", 2)):
        found = getattr(exposed(sequence_parallel=True).times, action)
        assert found == pytest.approx(compute(action) + passes * (ring + 5))
    hidden = block_of(on_device(config, tensor_parallel_overlap=1.0)).plain.times
    assert hidden.forward == pytest.approx(compute("forward"))


LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


@pytest.mark.parametrize("model", [llama(), llama(**LATENT)])
def test_collectives_wait_for_every_step_around_their_ring(model: Transformer) -> None:
    """An all-reduce of t devices has 2 (t - 1) steps, a gather or a scatter t - 1."""
    config = on_device(estimate_config(model, tensor_parallel=4), memory_bandwidth=None)
    slow = on_device(config, tensor_parallel_step_latency=2.0)

    def longer(**parallel: Any) -> list[float]:
        more, less = (block_of(changed(each, **parallel)).plain.times for each in (slow, config))
        actions = ("forward", "backward_input", "backward_weight")
        return [getattr(more, action) - getattr(less, action) for action in actions]

    assert longer() == pytest.approx([2 * 2 * 6.0, 2 * 2 * 6.0, 0])  # two halves
    assert longer(sequence_parallel=True) == pytest.approx([2 * 2 * 6.0, 2 * 2 * 6.0, 2 * 6.0])
    assert longer(tensor_parallel=1) == [0, 0, 0]


def test_embedding_and_head_exchange_less() -> None:
    """The embedding sums parts of the vocabulary in F, and the head sums its input's gradient in I. With
    sequence parallelism, a scatter and a gather replace these sums."""
    config = on_device(estimate_config(llama(), tensor_parallel=4), memory_bandwidth=None)
    free = on_device(config, tensor_parallel_overlap=1.0)
    ring = 2 * 4096 * 4096 * 3 / 4 / 100e9 * 1e6

    def exchanged(layer: int, **parallel: Any) -> list[float]:
        costs, products = (estimate_layers(changed(each, **parallel))[layer] for each in (config, free))
        return [
            getattr(costs.plain.times, action) - getattr(products.plain.times, action)
            for action in ("forward", "backward_input", "backward_weight")
        ]

    one, two = ring + 5, 2 * ring + 5
    assert exchanged(0) == pytest.approx([two, 0, 0])
    assert exchanged(2) == pytest.approx([0, two, 0])
    assert exchanged(0, sequence_parallel=True) == pytest.approx([one, one, 0])
    assert exchanged(2, sequence_parallel=True) == pytest.approx([one, one, one])


def test_embedding_and_head_move_tables_and_logits() -> None:
    """The embedding copies rows; the gradient of its table is zeroed, filled and added."""
    config = estimate_config(llama(), precision="mixed-fp32-gradients")
    row, table, logits = 2 * 4096 * 4096, 4096 * 32000, 4096 * 32000
    embedding, _, head = (layer.plain.times for layer in estimate_layers(config))
    per_byte = 1e6 / 1000e9
    assert embedding.forward == pytest.approx(2 * row * per_byte)
    assert embedding.backward_weight == pytest.approx((2 * row + table * (2 * 2 + 2 * 4)) * per_byte)
    product = head.backward_weight
    assert head.forward - product == pytest.approx((2 * row + (2 + 9 * 4) * logits) * per_byte)
    assert head.backward_input - product == pytest.approx((3 * row + (3 * 4 + 2) * logits) * per_byte)


@pytest.mark.parametrize(
    ("shape", "embedding", "attention", "mlp", "head"),
    [
        # 100 tokens of 8 values and 4 bytes are 3200; the table of 1000 has 32000, logits in float32 400000.
        ({}, 3200 + 32000, (1 + 1 + 3) * 3200, (1 + 2 * 4) * 3200, 2 * 400_000),
        # Rows of tokens, rows of positions, and their sum; the two gradients around the final norm.
        ({"vocabulary": 2}, 3 * 3200, (1 + 1 + 3) * 3200, (1 + 2 * 4) * 3200, 2 * 3200),
        # Scores and their gradient, 4 heads of 100 · 100; the gate has its own gradient.
        (
            {"attention": "plain", "gated": True, "fused_activation": False},
            3200 + 32000,
            (1 + 1 + 2 * 3) * 3200 + 2 * 4 * 4 * 100 * 100,
            (1 + 3 * 4) * 3200,
            2 * 400_000,
        ),
    ],
)
def test_workspace_is_the_largest_extra_memory_of_any_action(
    shape: dict[str, Any], embedding: int, attention: int, mlp: int, head: int
) -> None:
    small = {"hidden": 8, "layers": 1, "heads": 4, "vocabulary": 1000, "sequence": 100, "dtype": "float32"}
    config = estimate_config(Transformer.model_validate({**small, **shape}), granularity="half")
    found = [layer.plain.workspace for layer in estimate_layers(config)]
    assert found == [embedding, attention, mlp, head]


@pytest.mark.parametrize(
    ("shape", "embedding", "attention", "mlp", "head"),
    [
        # In units of 4096 bytes, a token's width. In addition to the gradient of a weight, B holds: for the
        # last matrix, the gradients of its input and of the residual stream; for the first matrix and the
        # head, only the gradient of the input.
        ({}, 1 + 8, 1 + 3 * 1024, 1 + 4 + 4 * 1024, 8 + 1),
        ({"kv_heads": 1}, 1 + 8, 1 + 1024 * 1.5, 1 + 4 + 4 * 1024, 8 + 1),
        # A gated MLP's first matrix is twice as large, and three tensors of the MLP's width are released.
        ({"gated": True, "fused_activation": False}, 1 + 8, 1 + 3 * 1024, 2 - 8 + 8 * 1024, 8 + 1),
        ({"gated": True, "fused_activation": True}, 1 + 8, 1 + 3 * 1024, 2 - 4 + 8 * 1024, 8 + 1),
    ],
)
def test_with_few_tokens_the_gradient_of_a_weight_dominates_the_workspace(
    shape: dict[str, Any], embedding: float, attention: float, mlp: float, head: float
) -> None:
    """B computes it before it is accumulated."""
    few = {"hidden": 1024, "layers": 1, "heads": 4, "vocabulary": 8, "sequence": 1, "dtype": "float32"}
    model = Transformer.model_validate({**few, "ffn": 4096, **shape})
    found = [layer.plain.workspace for layer in estimate_layers(estimate_config(model, granularity="half"))]
    assert found == [4096 * tokens for tokens in (embedding, attention, mlp, head)]
