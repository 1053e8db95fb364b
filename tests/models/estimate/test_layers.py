"""Layers of a model: which there are, properties of every estimate of them, and recomputation."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from operator import attrgetter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.estimates import Document, but, estimate_config, estimate_configs, llama, modern_configs
from support.titan_operations import BLOCKS, block
from zbv_models.estimate.config import EstimateConfig, estimate_layers, parse_config, problem_document
from zbv_models.estimate.layers import LayerEstimate, estimate_model
from zbv_models.estimate.model import Transformer
from zbv_models.estimate.recurrent import DeltaNet, Mamba
from zbv_models.estimate.replica import Running
from zbv_models.estimate.shapes import PerAction
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.reading import parse_any_problem
from zbv_solver.search.layered import first_plan

EXPERTS = {"experts": 4, "experts_per_token": 2, "expert_ffn": 64,
           "state_space": {"parameters": 1, "flops": 1}}  # fmt: skip
VISION = {"hidden": 64, "layers": 3, "heads": 4, "patches": 16, "merged": 4, "images": 2, "bias": False}


def changed(config: EstimateConfig, **parallel: Any) -> EstimateConfig:
    return but(config, parallel=but(config.parallel, **parallel))


def layers(model: Document, **parallel: Any) -> dict[str, LayerEstimate]:
    made = llama(**{"hidden": 256, "heads": 4, "layers": 4, **model})
    return {layer.name: layer for layer in estimate_layers(estimate_config(made, **parallel))}


@given(estimate_configs() | modern_configs())
def test_every_estimate_is_a_problem_that_the_planner_accepts(config: EstimateConfig) -> None:
    document = problem_document(config)
    # A model of one block has too few layers for the stages, which is not the estimate's concern.
    problem = parse_any_problem({**document, "cut": {"allow_empty": True}})
    assert isinstance(problem, LayeredProblem)
    halves = 2 if config.parallel.granularity == "half" else 1
    predictions = config.model.prediction_layers
    assert problem.model.n_layers == 2 + halves * config.model.layers + predictions
    assert problem.model.can_recompute == (config.recompute != "none")
    for layer in estimate_layers(config):
        assert min(layer.plain.times.forward, layer.plain.times.backward_input, layer.plain.workspace) >= 0
        assert layer.static.total > 0
        assert layer.shares.total == pytest.approx(layer.plain.times.total)


@given(estimate_configs(granularity="half"))
def test_a_block_is_the_sum_of_its_halves(config: EstimateConfig) -> None:
    block = estimate_layers(changed(config, granularity="block"))[1]
    first, second = estimate_layers(config)[1:3]
    assert (first.name, second.name) == ("block.0.attention", "block.0.mlp")
    for summed in map(attrgetter, ("flops", "static", "parameters")):
        assert summed(block) == summed(first) + summed(second)
    for summed in map(attrgetter, ("times", "after_forward", "after_input")):
        assert summed(block.plain) == summed(first.plain) + summed(second.plain)
    largest = max(first.plain.workspace, second.plain.workspace)
    if config.parallel.zero_stage < 2 or config.parallel.data_parallel == 1:
        assert block.plain.workspace == largest
    else:  # replicas gather and reduce a whole block at once
        assert largest <= block.plain.workspace <= first.plain.workspace + second.plain.workspace
    assert block.output_bytes == first.output_bytes == second.output_bytes


@given(modern_configs() | estimate_configs(sequence_parallel=True), st.sampled_from(("block", "half")))
def test_parallelism_divides_work_and_adds_none(config: EstimateConfig, granularity: str) -> None:
    """Over all devices, except latent vectors, which devices may compute in common."""
    config = changed(config, granularity=granularity)
    ones = ("tensor_parallel", "context_parallel", "expert_parallel", "expert_parallel_in_node")
    alone = changed(config, **dict.fromkeys(ones, 1))
    devices = config.parallel.tensor_parallel * config.parallel.context_parallel
    for whole, part in zip(estimate_layers(alone), estimate_layers(config), strict=True):
        assert part.flops.total * devices == pytest.approx(whole.flops.total)
        assert part.parameters <= whole.parameters
        assert whole.plain.after_forward / devices <= part.plain.after_forward + 1
        assert part.plain.after_forward <= whole.plain.after_forward + 1
        assert part.output_bytes * devices == whole.output_bytes


@given(estimate_configs())
def test_replicas_share_only_static_memory_and_more_in_higher_stages_of_zero(config: EstimateConfig) -> None:
    stages = [estimate_layers(changed(config, zero_stage=stage)) for stage in range(4)]
    for copies in zip(*stages, strict=True):
        sizes = [layer.static.total for layer in copies]
        assert sizes == sorted(sizes, reverse=True)
        assert len({replace(layer.plain, workspace=0) for layer in copies}) == 1
        assert copies[0].plain == copies[1].plain
    alone = estimate_layers(changed(config, data_parallel=1))
    assert alone == estimate_layers(changed(config, data_parallel=1, zero_stage=0))


@given(estimate_configs(recompute="full"))
def test_full_recomputation_keeps_only_the_input_and_adds_a_forward(config: EstimateConfig) -> None:
    for layer in estimate_layers(config):
        plain, again = layer.plain, layer.full
        if again is None:
            assert layer.name in ("embedding", "head")
            continue
        assert again.times.forward == plain.times.forward
        assert again.times.backward_input == pytest.approx(plain.times.backward_input + plain.times.forward)
        assert again.times.backward_weight == plain.times.backward_weight
        assert again.after_forward == layer.output_bytes  # the input is as large
        assert again.after_input == plain.after_input
        assert again.workspace - plain.workspace == plain.after_forward - again.after_forward


@given(modern_configs())
def test_sequences_of_a_microbatch_are_an_argument(config: EstimateConfig) -> None:
    links = config.device.links
    first = estimate_model(config.model, config.degrees, config.device, links, config.training, 2)
    doubled = but(config, model=but(config.model, microbatch_size=2))
    assert first.layers == estimate_layers(parse_config(doubled.model_dump()))


BLOCK = {**EXPERTS, "state_space": None}


@pytest.mark.parametrize(("model", "names"), [
    ({}, "embedding block*4 head"),
    ({**EXPERTS, "layers": 5, "pattern": "MM*-E"},
     "embedding state-space*2 attention*1 mlp*1 experts*1 head"),
    ({**EXPERTS, "pattern": "M*M-"}, "embedding state-space.0 attention*1 state-space.2 mlp*1 head"),
    ({**EXPERTS, "pattern": "(*-)(WE)(WE)(ME)", "window": 16},
     "embedding dense-global*1 moe-local*2 moe-state-space*1 head"),
    ({**BLOCK, "pattern": "(WE)BBB", "window": 16}, "embedding moe*4 head"),
    ({**BLOCK, "dense_layers": 1}, "embedding dense*1 moe*3 head"),
    ({**BLOCK, "expert_every": 2}, "embedding dense.0 moe.1 dense.2 moe.3 head"),
    ({**BLOCK, "window": 16, "full_attention_every": 4}, "embedding moe-local*3 moe-global*1 head"),
    ({"vision": VISION}, "patches vision*3 projector embedding block*4 head"),
    ({"vision": {**VISION, "window": 4, "full_attention": [1]}},
     "patches vision.0 vision.1 vision.2 projector embedding block*4 head"),
    ({"prediction_layers": 2}, "embedding block*4 prediction.0 prediction.1 head"),
])  # fmt: skip
def test_equal_neighbours_are_one_layer_with_copies(model: Document, names: str) -> None:
    shown = [name + (f"*{layer.repeat}" if layer.repeat else "") for name, layer in layers(model).items()]
    assert " ".join(shown) == names
    if "expert_every" in model:  # halves are layers of every copy, and equal ones are computed once
        halves = layers(model, granularity="half")
        assert list(halves)[3:7] == ["moe.1.attention", "moe.1.experts", "dense.2.attention", "dense.2.mlp"]
        assert halves["dense.0.mlp"].plain is halves["dense.2.mlp"].plain


def test_a_prediction_module_is_a_projection_and_layers() -> None:
    """DeepSeek-V3, §2.2: 2h to h, three norms; a copy of the table unless the embedding is on its rank."""
    joining, table = 2 * 256**2 + 3 * 256, 32000 * 256
    found = layers({"prediction_layers": 1})
    assert found["prediction"].parameters == found["block"].parameters + joining + table
    assert found["prediction"].output_bytes == 2 * found["block"].output_bytes
    on_one_rank = layers({"prediction_layers": 1}, placement="v")["prediction"]
    assert on_one_rank.parameters == found["block"].parameters + joining
    # Nemotron-H: the last layer is half a block, and a module has attention and experts.
    hybrid = layers({**EXPERTS, "pattern": "M*-E", "prediction_layers": 1, "prediction_pattern": "(*E)"})
    sizes = [hybrid[name].parameters for name in ("prediction", "attention", "experts")]
    assert sizes[0] == sizes[1] + sizes[2] + joining + table


@pytest.mark.parametrize("granularity", ["block", "half"])
def test_several_prediction_modules_share_one_table_in_one_stage(granularity: str) -> None:
    """Megatron-LM has one embedding on the rank of its MTP layers, and all of these in one stage."""

    def of(modules: int, placement: str) -> tuple[int, Document]:
        made = llama(hidden=256, heads=4, layers=4, prediction_layers=modules)
        config = estimate_config(made, placement=placement, granularity=granularity)
        count = sum(layer.parameters * layer.copies for layer in estimate_layers(config))
        return count, problem_document(config)

    (none, _), (in_v, document) = of(0, "v"), of(3, "v")
    for tied in (False, True):  # one rank has both ends in any placement
        placements = ("single", "v")
        alone = llama(hidden=256, heads=4, layers=4, prediction_layers=1, tied_embeddings=tied)
        first, second = (
            estimate_layers(estimate_config(alone, placement=each, pp_degree=1)) for each in placements
        )
        assert first == second
    assert "cut" not in document
    separate, document = of(3, "auto")
    assert separate - of(0, "auto")[0] == in_v - none + 32000 * 256
    problem = parse_any_problem({**document, "pp_degree": 4, "placement": "single"})
    assert isinstance(problem, LayeredProblem)
    cut = first_plan(problem).problem.model
    assert cut is not None
    assert sum(any(name.startswith("prediction") for name in stage) for stage in cut.partition) == 1


def test_a_tied_head_needs_a_copy_unless_the_ends_are_on_one_rank() -> None:
    for tied, placement in product((False, True), ("v", "loop")):
        head = layers({"tied_embeddings": tied}, placement=placement)["head"].parameters
        assert head == (0 if tied and placement == "v" else 32000 * 256) + 256


H, PATCHES = 64, 2 * 16


@pytest.mark.parametrize(("vision", "name", "sizes"), [
    ({}, "patches", {"parameters": 588 * H + 16 * H, "output_bytes": PATCHES * H * 2}),
    ({"positions": "rotary"}, "patches", {"parameters": 588 * H}),
    # Each image by itself, without a mask; some blocks within pieces of 4 patches (Qwen2.5-VL).
    ({}, "vision", {"flops": 2 * PATCHES * 12 * H**2 + 4 * 2 * 16**2 * H, "parameters": 12 * H**2 + 4 * H}),
    ({"window": 4}, "vision", {"flops": 2 * PATCHES * 12 * H**2 + 4 * 2 * 16 * 4 * H}),
    *(({"window": 4, "full_attention": [1]}, f"vision.{n}",
       {"flops": 2 * PATCHES * 12 * H**2 + 4 * 2 * 16 * reach * H}) for n, reach in ((0, 4), (1, 16))),
    ({}, "projector", {"parameters": 4 * H * 256 + 256**2 + 2 * H, "output_bytes": PATCHES // 4 * 256 * 2,
                       "flops": 2 * (PATCHES / 4) * (4 * H * 256 + 256**2)}),
    # Parameters of others are compared with those that transformers counts.
    ({"projectors": 4}, "projector", {"parameters": 4 * (4 * H * 256 + 256**2 + 2 * H),
                                      "output_bytes": 4 * PATCHES // 4 * 256 * 2}),
    # GLM-4.1V: the last matrix but one has a second one, and its activation reads both.
    ({"projector": [256, 512], "projector_gated": True}, "projector", {
        "parameters": 4 * H * 256 + 2 * 256 * 512 + 512 * 256 + 2 * H,
        "after_forward": 4 * PATCHES * H + 8 * PATCHES + 8 * 2 * (256 + 1024 + 256 + 512),
    }),
])  # fmt: skip
def test_sizes_of_a_vision_encoder(vision: Document, name: str, sizes: dict[str, float]) -> None:
    layer = layers({"vision": {**VISION, **vision}})[name]
    found = {**vars(layer), "flops": layer.flops.forward, "after_forward": layer.plain.after_forward}
    assert {key: found[key] for key in sizes} == sizes


VALUES, CONVOLVED, INNER = 64, 2 * 16 + 64, 64 + (64 + 2 * 16) + 4
DELTA = CONVOLVED + VALUES + 8
"""Widths of a Gated DeltaNet's values, of its convolved ones, and of its projection; and of a Mamba's."""


@pytest.mark.parametrize(
    ("layer", "costs"),
    [
        # Qwen3-Next, divided: parameters as transformers has them, products and what a state takes.
        (DeltaNet(hidden=32, key_heads=2, value_heads=4, key_dim=8, value_dim=16), {
            "parameters": 32 * (DELTA + VALUES) + CONVOLVED * 4 + 8 + 16 + 32,
            "flops": 2 * 32 * (DELTA + VALUES),
            "core_flops": 4 * (2 * 64 * (3 * 8 + 2 * 16) + 64**2 + 3 * 2 * 8 * 16),
            "memory_traffic": 2 * (5 * 32 + 6 * CONVOLVED + 5 * VALUES),
            "after_forward": 2 * (2 * 32 + DELTA + CONVOLVED + 2 * VALUES) + 4 * 4 * 8 * 16 / 64,
            "after_input": 2 * (2 * 32 + DELTA + VALUES)}),
        # Dao and Gu 2024, §6: products inside a chunk of 16 tokens, and with the states of 2 · 8 values.
        (Mamba(hidden=32, heads=4, inner=64, state=8, groups=2, chunk=16), {
            "parameters": 32 * (INNER + 64) + 96 * 5 + 3 * 4 + 64 + 32,
            "flops": 2 * 32 * (INNER + 64),
            "core_flops": 2 * 16 * (16 + 64) + 2 * 2 * 8 * 64,
            "memory_traffic": 2 * (5 * 32 + 4 * 96 + 5 * 64),
            "after_forward": 2 * (2 * 32 + INNER + 96 + 2 * 64) + 4 * 8 * 64 / 16,
            "after_input": 2 * (2 * 32 + INNER + 64)}),
    ],
    ids=["Gated DeltaNet", "Mamba-2"],
)  # fmt: skip
def test_costs_of_recurrent_layers(layer: DeltaNet | Mamba, costs: dict[str, float]) -> None:
    assert layer.costs() == costs


LATENT = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 24}
SPARSE = {"experts": 8, "experts_per_token": 2, "expert_ffn": 128, "shared_expert_ffn": 192}


def test_the_shortest_backward_is_split_or_fused() -> None:
    for fused, backward in ((None, (4, 3)), (8.0, (4, 3)), (5.0, (4, 1)), (3.0, (3, 0))):
        assert Running(PerAction(1, 4, 3), 0, 0, 0, fused).shortest == PerAction(1, *backward)


def repeated(modules: list[str], model: Document) -> tuple[float, float]:
    """Bytes per token that F saves, and microseconds that I takes in addition."""
    chosen = {"recompute": "selective", "recompute_modules": modules}
    layer = list(layers({"layers": 2, "ffn": 512, **model}, **chosen).values())[1]
    plain, again = layer.plain, layer.selective
    assert again is not None
    assert (again.after_input, again.times.forward) == (plain.after_input, plain.times.forward)
    assert again.workspace >= plain.workspace
    added = again.times.backward_input - plain.times.backward_input
    return (plain.after_forward - again.after_forward) / 4096, added


def time_of(products: float, values: float) -> float:
    """Microseconds of products with so many weights, and of the traffic of so many values of a token."""
    return 4096 * 1e6 * (2 * products / 100e12 + 2 * values / 1e12)


@pytest.mark.parametrize(("model", "modules", "dropped", "time"), [
    # Outputs of 256 values; a norm reads and writes a tensor. Others are parts of the next product.
    (LATENT, ["layernorm"], 2 * 256, time_of(0, 2 * 256)),
    ({**LATENT, **SPARSE}, ["layernorm"], 2 * 2 * 256, time_of(0, 2 * 2 * 256)),
    (LATENT, ["mla_up_proj"], 2 * 4 * (2 * 48 + 24), time_of(256 * 4 * 48 + 64 * 4 * 56, 4 * 4 * 48)),
    ({}, ["mlp"], 2 * (3 * 512 + 256), time_of(3 * 256 * 512, 3 * 512 + 2 * 256)),
    # Korthikanti et al. 2022, §5: scores, their softmax and a mask.
    ({"attention": "plain", "dropout": True}, ["core_attn"], 5 * 4 * 4096,
        time_of(2 * 4096 * 256, 4.5 * 4 * 4096),
    ),
    (SPARSE, ["moe_act"], 2 * 2 * 128, time_of(0, 3 * 2 * 128)),
    (SPARSE, ["shared_experts"], 2 * 3 * 192, time_of(3 * 256 * 192, 3 * 192)),
])  # fmt: skip
def test_recomputed_modules(model: Document, modules: list[str], dropped: int, time: float) -> None:
    assert repeated(modules, model) == pytest.approx((dropped, time))


def test_experts_as_a_whole_have_their_parts() -> None:
    whole, time = repeated(["moe"], SPARSE)
    assert whole == (4 + 1) * 8 + 2 * 2 * (256 + 3 * 128) + 2 * 3 * 192
    assert time > repeated(["shared_experts"], SPARSE)[1]
    assert repeated(["moe", "moe_act", "shared_experts"], SPARSE) == (whole, time)


NORMALISERS = 4 * 64 * 16
LLAMA, QWEN = BLOCKS["llama3"][-1], BLOCKS["qwen3 with experts"][-1]


@pytest.mark.parametrize(("model", "products", "others"), [
    # wqkv, w1, w2
    (LLAMA, 98_304 + 98_304 + 32_768, 32_768 + NORMALISERS),
    # A product with a bias is saved and not counted: after wqkv, wo and w3 are the first and the third.
    ({**LLAMA, "qkv_bias": True}, 98_304 + 32_768 + 98_304, 32_768 + NORMALISERS),
    # wq, wkv_b, w1, w2
    (BLOCKS["deepseek_v3"][-1], 393_216 + 524_288 + 131_072 + 32_768, 2 * 64 * 16 * 128 + NORMALISERS),
    # wq, wkv_b, w1 and w2 of shared experts; scores (on a GPU in 4 bytes) and numbers of the chosen ones
    (BLOCKS["deepseek_v3 with experts"][-1], 393_216 + 524_288 + 65_536 + 32_768,
     2 * 64 * 16 * 128 + NORMALISERS + 2 * 384 + 1_536),
    # wqkv; no product of routed experts
    (QWEN, 524_288, 262_144 + NORMALISERS + 2 * 1_024 + 4_096),
])  # fmt: skip
def test_a_block_keeps_what_torchtitan_saves(model: Document, products: int, others: int) -> None:
    """Blocks of torchtitan 0.3.0 under ``SelectiveAC``: two sequences of 32 tokens, with torch 2.13 on a CPU.

    The bytes of flash attention were not counted. ``make torchtitan`` counts the others again.
    """
    layer = block(model)
    assert layer.selective is not None
    assert layer.selective.after_forward == 2 * 64 * 256 + products + others
    # All that is computed again exists at once, while the block's backward runs.
    again, plain = layer.selective, layer.plain
    assert again.workspace + again.after_forward == plain.workspace + plain.after_forward


def test_everything_but_attention_and_saved_products_is_computed_again() -> None:
    dense, shared = block(LLAMA), block(QWEN, expert_parallel=8, data_parallel=8, expert_parallel_in_node=1)
    added = [
        layer.selective.times.backward_input - layer.plain.times.backward_input
        for layer in (dense, shared) if layer.selective is not None
    ]  # fmt: skip
    products = 2 * 64 * 256 * (768 + 768 + 768) + 2.0 * 2 * 32**2 / 2 * 256 * 2  # those of attention last
    assert added[0] == pytest.approx(dense.plain.times.forward - products / 100e12 * 1e6)
    assert added[1] > shared.exchanged.forward > 0, "with experts also their exchanges"


SMALL = {"hidden": 8, "layers": 1, "heads": 4, "vocabulary": 1000, "sequence": 100, "dtype": "float32"}
"""100 tokens of 8 values and 4 bytes are 3200 bytes, the table 32000, and logits in float32 400000."""
FEW = {**SMALL, "hidden": 1024, "vocabulary": 8, "sequence": 1, "ffn": 4096}
"""One token of 4096 bytes."""


@pytest.mark.parametrize(("model", "sizes"), [
    (SMALL, [3200 + 32000, (1 + 1 + 3) * 3200, (1 + 2 * 4) * 3200, 2 * 400_000]),
    # Rows of tokens, rows of positions, and their sum; the two gradients around the final norm.
    ({**SMALL, "vocabulary": 2}, [3 * 3200, (1 + 1 + 3) * 3200, (1 + 2 * 4) * 3200, 2 * 3200]),
    # Scores and their gradient, 4 heads of 100 · 100; the gate has its own gradient.
    ({**SMALL, "attention": "plain", "gated": True, "fused_activation": False},
     [3200 + 32000, (1 + 1 + 2 * 3) * 3200 + 2 * 4 * 4 * 100 * 100, (1 + 3 * 4) * 3200, 2 * 400_000]),
    # The gradient of a weight dominates, which B computes before it is accumulated. For the last matrix,
    # the gradients of its input and of the stream exist, too; for the first one and the head only that of
    # the input.
    ({**FEW, "kv_heads": 1}, [4096 * n for n in (1 + 8, 1 + 1024 * 1.5, 1 + 4 + 4 * 1024, 8 + 1)]),
    # A gated MLP's first matrix is twice as large, and three tensors of the MLP's width are released.
    *(({**FEW, "gated": True, "fused_activation": fused},
       [4096 * n for n in (1 + 8, 1 + 3 * 1024, 2 - released + 8 * 1024, 8 + 1)])
      for fused, released in ((False, 8), (True, 4))),
])  # fmt: skip
def test_workspace_is_the_largest_extra_memory_of_any_action(model: Document, sizes: list[float]) -> None:
    """Of embedding, attention, MLP and head."""
    config = estimate_config(Transformer.model_validate(model), granularity="half")
    assert [layer.plain.workspace for layer in estimate_layers(config)] == sizes
