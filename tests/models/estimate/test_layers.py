"""Layers of a model: which there are, and properties of every estimate of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.estimates import but, estimate_config, estimate_configs, llama, modern_configs
from zbv_models.estimate.config import EstimateConfig, estimate_layers, parse_config, problem_document
from zbv_models.estimate.layers import LayerEstimate, estimate_model
from zbv_models.estimate.model import Transformer
from zbv_models.estimate.state_space import DeltaNet, Mamba
from zbv_models.estimate.times import step_times
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.reading import parse_any_problem

EXPERTS = {
    "experts": 4,
    "experts_per_token": 2,
    "expert_ffn": 64,
    "state_space": {"parameters": 1, "flops": 1},
}
VISION = {"hidden": 64, "layers": 3, "heads": 4, "patches": 16, "merged": 4, "images": 2, "bias": False}


def changed(config: EstimateConfig, **parallel: Any) -> EstimateConfig:
    return but(config, parallel=but(config.parallel, **parallel))


def layers(model: dict[str, Any], **parallel: Any) -> dict[str, LayerEstimate]:
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
    for summed in ("flops", "static", "parameters"):
        assert getattr(block, summed) == getattr(first, summed) + getattr(second, summed)
    for summed in ("times", "after_forward", "after_input"):
        assert getattr(block.plain, summed) == getattr(first.plain, summed) + getattr(second.plain, summed)
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


@given(modern_configs())
def test_sequences_of_a_microbatch_are_an_argument(config: EstimateConfig) -> None:
    """The layout search calls it with plain records, and twice gives twice the same."""
    arguments = (config.model, config.degrees, config.device, config.device.links, config.training)
    first, second = estimate_model(*arguments, 2), estimate_model(*arguments, 2)
    assert first == second
    doubled = but(config, model=but(config.model, microbatch_size=2))
    assert first.layers == estimate_layers(parse_config(doubled.model_dump()))


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ({}, "embedding block*4 head"),
        ({"layers": 5, "pattern": "MM*-E"}, "embedding state-space*2 attention*1 mlp*1 experts*1 head"),
        ({"pattern": "M*M-"}, "embedding state-space.0 attention*1 state-space.2 mlp*1 head"),
        ({"pattern": "(*-)(WE)(WE)(ME)", "window": 16},
         "embedding dense-global*1 moe-local*2 moe-state-space*1 head"),
        ({"pattern": "(WE)BBB", "window": 16, "state_space": None}, "embedding moe*4 head"),
        ({"state_space": None, "dense_layers": 1}, "embedding dense*1 moe*3 head"),
        ({"state_space": None, "expert_every": 2}, "embedding dense.0 moe.1 dense.2 moe.3 head"),
        ({"state_space": None, "window": 16, "full_attention_every": 4},
         "embedding moe-local*3 moe-global*1 head"),
        ({"vision": VISION}, "patches vision*3 projector embedding block*4 head"),
        ({"vision": {**VISION, "window": 4, "full_attention": [1]}},
         "patches vision.0 vision.1 vision.2 projector embedding block*4 head"),
        ({"prediction_layers": 2}, "embedding block*4 prediction*2 head"),
    ],
)  # fmt: skip
def test_equal_neighbours_are_one_layer_with_copies(model: dict[str, Any], names: str) -> None:
    experts = EXPERTS if {"pattern", "state_space"} & set(model) else {}
    found = layers({**experts, **model})
    assert (
        " ".join(name + (f"*{layer.repeat}" if layer.repeat else "") for name, layer in found.items())
        == names
    )


def test_halves_are_layers_of_every_copy() -> None:
    model = {**EXPERTS, "state_space": None, "layers": 2, "expert_every": 2}
    names = ["embedding", "dense.attention", "dense.mlp", "moe.attention", "moe.experts", "head"]
    found = list(layers(model, granularity="half"))
    assert [name.replace(".0", "") for name in found] == names
    assert found[1:3] == ["dense.0.attention", "dense.0.mlp"]


def test_a_layer_of_the_pattern_is_as_the_same_layer_of_a_block() -> None:
    block, apart = layers({})["block"], layers({**EXPERTS, "pattern": "M*-E"})
    assert apart["attention"].flops + apart["mlp"].flops == block.flops
    pair = layers({**EXPERTS, "pattern": "(*-)(WE)(WE)(ME)", "window": 16})
    assert pair["dense-global"].flops == block.flops
    assert pair["moe-local"].flops == layers({**EXPERTS, "window": 16, "state_space": None})["moe"].flops


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
    two = hybrid["attention"].parameters + hybrid["experts"].parameters
    assert hybrid["prediction"].parameters == two + joining + table


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("placement", ["v", "loop"])
def test_a_tied_head_needs_a_copy_only_if_the_embedding_is_on_another_rank(
    tied: bool, placement: str
) -> None:
    """The first and the last stage of a V are on one rank."""
    head = layers({"tied_embeddings": tied}, placement=placement)["head"].parameters
    assert head == (0 if tied and placement == "v" else 32000 * 256) + 256


def test_equal_layers_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that alternate stand one by one; 510 of them cost no more than 8."""
    counted: list[int] = []

    def counting(*arguments: Any) -> Any:
        counted.append(1)
        return step_times(*arguments)

    monkeypatch.setattr("zbv_models.estimate.layers.step_times", counting)
    calls = []
    for count in (8, 510):
        counted.clear()
        assert len(layers({**EXPERTS, "layers": count, "pattern": "(*-)M" * (count // 2)})) == count + 2
        calls.append(len(counted))
    assert calls[0] == calls[1]


H, PATCHES = 64, 2 * 16


@pytest.mark.parametrize(
    ("vision", "name", "sizes"),
    [
        ({}, "patches", {"parameters": 588 * H + 16 * H, "output_bytes": PATCHES * H * 2}),
        # Each image by itself, without a mask; some blocks within pieces of 4 patches (Qwen2.5-VL).
        ({}, "vision", {"flops": 2 * PATCHES * 12 * H**2 + 4 * 2 * 16**2 * H}),
        ({"window": 4}, "vision", {"flops": 2 * PATCHES * 12 * H**2 + 4 * 2 * 16 * 4 * H}),
        ({"window": 4, "full_attention": [1]}, "vision.0",
         {"flops": 2 * PATCHES * 12 * H**2 + 4 * 2 * 16 * 4 * H}),
        ({"window": 4, "full_attention": [1]}, "vision.1",
         {"flops": 2 * PATCHES * 12 * H**2 + 4 * 2 * 16**2 * H}),
        ({}, "projector", {"parameters": 4 * H * 256 + 256**2 + 2 * H, "output_bytes": PATCHES // 4 * 256 * 2,
                           "flops": 2 * (PATCHES / 4) * (4 * H * 256 + 256**2)}),
        ({"bias": True}, "projector", {"parameters": 4 * H * 256 + 256**2 + 2 * H + 2 * 256}),
        # Pixtral: RMSNorm, and merged patches are projected to the encoder's width first.
        ({"gated": True, "norm": "rmsnorm", "positions": "rotary"}, "vision",
         {"parameters": 4 * H**2 + 3 * 4 * H * H + 2 * H}),
        ({"norm": "rmsnorm", "positions": "rotary"}, "patches", {"parameters": 588 * H}),
        ({"norm": "rmsnorm", "projector": [64, 256]}, "projector",
         {"parameters": 4 * H * H + H * 256 + 256**2 + H}),
        ({"pooled": True, "projector": []}, "projector", {"parameters": H * 256 + 2 * H}),
        ({"projectors": 4}, "projector", {"parameters": 4 * (4 * H * 256 + 256**2 + 2 * H),
                                          "output_bytes": 4 * PATCHES // 4 * 256 * 2}),
        # GLM-4.1V: the last matrix but one has a second one, and its activation reads both.
        ({"projector": [256, 512], "projector_gated": True}, "projector", {
            "parameters": 4 * H * 256 + 2 * 256 * 512 + 512 * 256 + 2 * H,
            "after_forward": 4 * PATCHES * H + 8 * PATCHES + 8 * 2 * (256 + 1024 + 256 + 512),
        }),
    ],
)  # fmt: skip
def test_a_vision_encoder_has_the_sizes_of_its_layers(
    vision: dict[str, Any], name: str, sizes: dict[str, float]
) -> None:
    layer = layers({"vision": {**VISION, **vision}})[name]
    found = {"parameters": layer.parameters, "flops": layer.flops.forward, "output_bytes": layer.output_bytes,
             "after_forward": layer.plain.after_forward}  # fmt: skip
    assert {key: found[key] for key in sizes} == sizes


def test_costs_of_a_gated_delta_net() -> None:
    """Qwen3-Next's sizes, divided: parameters as transformers has them, products and what a state takes."""
    costs = DeltaNet(hidden=32, key_heads=2, value_heads=4, key_dim=8, value_dim=16).costs()
    values, convolved = 64, 2 * 16 + 64
    projected = convolved + values + 8
    inside = 2 * 64 * (3 * 8 + 2 * 16) + 64**2
    assert costs == {
        "parameters": 32 * (projected + values) + convolved * 4 + 8 + 16 + 32,
        "flops": 2 * 32 * (projected + values),
        "core_flops": 4 * (inside + 3 * 2 * 8 * 16),
        "memory_traffic": 2 * (5 * 32 + 6 * convolved + 5 * values),
        "after_forward": 2 * (2 * 32 + projected + convolved + 2 * values) + 4 * 4 * 8 * 16 / 64,
        "after_input": 2 * (2 * 32 + projected + values),
    }


def test_costs_of_a_mamba_2_layer() -> None:
    """Dao and Gu 2024, §6: products inside a chunk of 16 tokens, and with the states of 2 · 8 values."""
    projected = 64 + (64 + 2 * 16) + 4
    assert Mamba(hidden=32, heads=4, inner=64, state=8, groups=2, chunk=16).costs() == {
        "parameters": 32 * (projected + 64) + 96 * 5 + 3 * 4 + 64 + 32,
        "flops": 2 * 32 * (projected + 64),
        "core_flops": 2 * 16 * (16 + 64) + 2 * 2 * 8 * 64,
        "memory_traffic": 2 * (5 * 32 + 4 * 96 + 5 * 64),
        "after_forward": 2 * (2 * 32 + projected + 96 + 2 * 64) + 4 * 8 * 64 / 16,
        "after_input": 2 * (2 * 32 + projected + 64),
    }


SMALL = {"hidden": 8, "layers": 1, "heads": 4, "vocabulary": 1000, "sequence": 100, "dtype": "float32"}
"""100 tokens of 8 values and 4 bytes are 3200 bytes, the table 32000, and logits in float32 400000."""
FEW = {**SMALL, "hidden": 1024, "vocabulary": 8, "sequence": 1, "ffn": 4096}
"""One token of 4096 bytes."""


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
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
    ],
)  # fmt: skip
def test_workspace_is_the_largest_extra_memory_of_any_action(
    model: dict[str, Any], sizes: list[float]
) -> None:
    """Of embedding, attention, MLP and head."""
    config = estimate_config(Transformer.model_validate(model), granularity="half")
    assert [layer.plain.workspace for layer in estimate_layers(config)] == sizes
