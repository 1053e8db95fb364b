"""Layers that are no block: prediction modules, given costs, vision; and properties of all modern models."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.estimates import but, estimate_config, llama, modern_configs, parts
from zbv_models.estimate.config import EstimateConfig, estimate_layers, parse_config, problem_document
from zbv_models.estimate.layers import LayerEstimate, estimate_model
from zbv_models.estimate.model_layers import parameters_of
from zbv_models.estimate.state_space import DeltaNet, Mamba
from zbv_models.estimate.times import step_times
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.reading import parse_any_problem

GIVEN = {"parameters": 1000, "flops": 2000.0, "core_flops": 300.0, "memory_traffic": 50.0,
         "after_forward": 9000.0, "after_input": 700.0}  # fmt: skip


def layers(**model: Any) -> dict[str, LayerEstimate]:
    made = estimate_layers(estimate_config(llama(**{"hidden": 256, "heads": 4, "layers": 4, **model})))
    return {layer.name: layer for layer in made}


def test_a_prediction_module_is_a_projection_and_a_block() -> None:
    """DeepSeek-V3, §2.2: 2h to h, three norms; a copy of the table unless the embedding is on its rank."""
    found = layers(prediction_layers=1)
    own = 2 * 256**2 + 3 * 256
    assert found["prediction"].parameters == found["block"].parameters + own + 32000 * 256
    on_one_rank = estimate_layers(
        estimate_config(llama(hidden=256, heads=4, prediction_layers=1), placement="v")
    )
    assert on_one_rank[2].parameters == found["block"].parameters + own
    assert found["prediction"].output_bytes == 2 * found["block"].output_bytes


def test_a_pattern_gives_every_layer_its_kind() -> None:
    """As in Nemotron-H: state space, attention, MLP, experts."""
    experts = {"experts": 4, "experts_per_token": 2, "expert_ffn": 64}
    found = layers(pattern="MM*-E", layers=5, state_space=GIVEN, **experts)
    assert list(found) == ["embedding", "state-space", "attention", "mlp", "experts", "head"]
    assert found["state-space"].repeat == 2
    block = layers()["block"]
    assert found["attention"].flops + found["mlp"].flops == block.flops
    interleaved = layers(pattern="M*M-", state_space=GIVEN)
    assert list(interleaved)[1:-1] == ["state-space.0", "attention", "state-space.2", "mlp"]


def test_a_pattern_may_have_blocks_of_two_halves() -> None:
    experts = {"experts": 4, "experts_per_token": 2, "expert_ffn": 64}
    found = layers(pattern="(*-)(WE)(WE)(ME)", window=16, state_space=GIVEN, **experts)
    assert list(found) == ["embedding", "dense-global", "moe-local", "moe-state-space", "head"]
    assert found["moe-local"].repeat == 2
    assert found["dense-global"].flops == layers()["block"].flops
    same = layers(pattern="(WE)(WE)(WE)(WE)", window=16, **experts)
    assert same["moe"] == layers(window=16, **experts)["moe"]


def test_a_prediction_module_may_have_its_own_layers() -> None:
    """Nemotron-H: the last layer is half a block, and a module has attention and experts."""
    experts = {"experts": 4, "experts_per_token": 2, "expert_ffn": 64}
    found = layers(
        pattern="M*-E", state_space=GIVEN, prediction_layers=1, prediction_pattern="(*E)", **experts
    )
    own = 2 * 256**2 + 3 * 256 + 32000 * 256
    assert found["prediction"].parameters == found["attention"].parameters + found["experts"].parameters + own


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
        assert len(layers(layers=count, pattern="(*-)M" * (count // 2), state_space=GIVEN)) == count + 2
        calls.append(len(counted))
    assert calls[0] == calls[1]


def test_costs_of_a_gated_delta_net() -> None:
    """Qwen3-Next's sizes, divided: parameters as transformers has them, products and what a state takes."""
    costs = DeltaNet(hidden=32, key_heads=2, value_heads=4, key_dim=8, value_dim=16).costs()
    keys, values, convolved = 16, 64, 96
    projected = convolved + values + 8
    assert costs["flops"] == 2 * 32 * (projected + values)
    assert costs["parameters"] == 32 * (projected + values) + convolved * 4 + 8 + 16 + 32
    inside = 2 * 64 * (3 * 8 + 2 * 16) + 64**2
    assert costs["core_flops"] == 4 * (inside + 3 * 2 * 8 * 16)
    assert costs["after_forward"] == 2 * (2 * 32 + projected + convolved + 2 * values) + 4 * 4 * 8 * 16 / 64
    assert keys * 2 + values == convolved


def test_given_costs_are_per_token() -> None:
    part = parts(llama(hidden=256, heads=4, pattern="M", layers=1, state_space=GIVEN))["state-space"]
    assert part.parameters.total == 1000
    assert part.flops.backward_weight == pytest.approx(2000 * 4096)
    assert part.flops.forward == pytest.approx(2300 * 4096)
    assert part.flops.backward_input == pytest.approx(2600 * 4096)
    assert part.moved.forward == 50 * 4096
    assert (part.after_forward, part.after_input) == (9000 * 4096, 700 * 4096)


VISION = {"hidden": 64, "layers": 3, "heads": 4, "patches": 16, "patch_values": 588, "merged": 4, "images": 2}


def test_a_vision_encoder_comes_first() -> None:
    """Its tokens are patches of all images; each sees its own image, without a mask."""
    found = layers(vision=VISION)
    assert list(found) == ["patches", "vision", "projector", "embedding", "block", "head"]
    assert found["vision"].repeat == 3
    patches, h = 2 * 16, 64
    scores = 4 * 2 * 16**2 * h
    assert found["vision"].flops.forward == 2 * patches * 12 * h**2 + scores
    assert found["vision"].output_bytes == 2 * patches * h
    assert found["projector"].output_bytes == 2 * (patches // 4) * 256
    assert found["projector"].flops.forward == 2 * (patches / 4) * (4 * h * 256 + 256**2)


def test_an_encoder_may_have_gates_rotated_positions_and_another_projector() -> None:
    """Pixtral: RMSNorm and no biases; merged patches are projected to the encoder's width first."""
    changes = {"gated": True, "norm": "rmsnorm", "bias": False, "positions": "rotary", "projector": [64, 256]}
    found = layers(vision={**VISION, **changes})
    h = 64
    assert found["patches"].parameters == 588 * h
    assert found["vision"].parameters == 4 * h**2 + 3 * 4 * h * h + 2 * h
    assert found["projector"].parameters == 4 * h * h + h * 256 + 256**2 + h
    pooled = layers(vision={**VISION, "pooled": True, "projector": [], "bias": False})
    assert pooled["projector"].parameters == h * 256 + 2 * h
    several = layers(vision={**VISION, "projectors": 4})["projector"]
    assert several.parameters == 4 * layers(vision=VISION)["projector"].parameters
    assert several.output_bytes == 4 * layers(vision=VISION)["projector"].output_bytes


def test_blocks_of_an_encoder_may_attend_within_pieces() -> None:
    """Qwen2.5-VL: some blocks see all patches; every layer has a name of the encoder."""
    found = layers(vision={**VISION, "window": 4, "full_attention": [1]})
    assert list(found)[:4] == ["patches", "vision.0", "vision.1", "vision.2"]
    whole, scores = layers(vision=VISION)["vision"].flops.forward, 4 * 2 * 64
    assert found["vision.1"].flops.forward == whole
    assert found["vision.0"].flops.forward == whole - scores * (16**2 - 16 * 4)
    assert layers(vision={**VISION, "window": 4})["vision"].flops == found["vision.0"].flops


def test_a_projector_may_have_a_gate() -> None:
    """GLM-4.1V: the last matrix but one has a second one, and its activation reads both."""
    plain, gated = (
        layers(vision={**VISION, "bias": False, "projector": [256, 512], "projector_gated": gate})[
            "projector"
        ]
        for gate in (False, True)
    )
    assert gated.parameters - plain.parameters == 256 * 512
    assert gated.flops.forward - plain.flops.forward == 2 * (2 * 16 / 4) * 256 * 512
    assert gated.plain.after_forward - plain.plain.after_forward == 2 * (2 * 16 // 4) * 512
    assert gated.output_bytes == plain.output_bytes


def test_clip_vit_l_has_304_million_parameters() -> None:
    """Radford et al. 2021, ViT-L/14 at 336 pixels: 303,507,456 in its checkpoint, with a class token and a
    norm before the blocks.
    """
    vision = {"hidden": 1024, "layers": 24, "heads": 16, "patches": 576}
    model = llama(vision=vision)
    assert model.vision is not None
    others = parameters_of(llama()).total
    projector = 1024 * 4096 + 4096**2 + 2 * 4096 + 2 * 1024
    assert parameters_of(model).total - others - projector == pytest.approx(303_507_456, rel=1e-4)


@given(modern_configs())
def test_every_estimate_of_a_modern_model_is_a_problem(config: EstimateConfig) -> None:
    document = problem_document(config)
    problem = parse_any_problem({**document, "cut": {"allow_empty": True}})
    assert isinstance(problem, LayeredProblem)
    for layer in estimate_layers(config):
        assert layer.plain.times.forward >= 0
        assert layer.static.total > 0
        assert layer.plain.workspace >= 0
        assert layer.shares.total == pytest.approx(layer.plain.times.total)


@given(modern_configs(), st.booleans())
def test_parallelism_divides_operations_and_adds_none(config: EstimateConfig, halves: bool) -> None:
    """Over all devices, except latent vectors, which devices may compute in common."""
    alone = but(
        config,
        parallel=but(config.parallel, tensor_parallel=1, context_parallel=1, expert_parallel=1,
                     expert_parallel_in_node=1, granularity="half" if halves else "block"),
    )  # fmt: skip
    shared = but(config, parallel=but(config.parallel, granularity=alone.parallel.granularity))
    devices = config.parallel.tensor_parallel * config.parallel.context_parallel
    for whole, part in zip(estimate_layers(alone), estimate_layers(shared), strict=True):
        assert part.flops.total * devices == pytest.approx(whole.flops.total)
        assert part.parameters <= whole.parameters
        assert part.plain.after_forward <= whole.plain.after_forward + 1


@given(modern_configs())
def test_the_same_layout_gives_the_same_estimate(config: EstimateConfig) -> None:
    """The layout search calls it with plain records, and twice gives twice the same."""
    model = config.model
    given = (model, config.degrees, config.device, config.device.links, config.training)
    first, second = estimate_model(*given, 2), estimate_model(*given, 2)
    assert first == second
    doubled = parse_config(
        {**config.model_dump(), "model": {**config.model.model_dump(), "microbatch_size": 2}}
    )
    assert first.layers == estimate_layers(doubled)


def test_costs_of_a_mamba_2_layer() -> None:
    """Dao and Gu 2024, §6: products inside a chunk of 16 tokens, and with the states of 2 · 8 values."""
    mamba = Mamba(hidden=32, heads=4, inner=64, state=8, groups=2, chunk=16)
    projected = 64 + (64 + 2 * 16) + 4
    costs = mamba.costs()
    assert costs["flops"] == 2 * 32 * (projected + 64)
    assert costs["core_flops"] == 2 * 16 * (16 + 64) + 2 * 2 * 8 * 64
    assert costs["parameters"] == 32 * (projected + 64) + 96 * 5 + 3 * 4 + 64 + 32
    assert costs["after_forward"] == 2 * (2 * 32 + projected + 96 + 2 * 64) + 4 * 8 * 64 / 16
    assert costs["after_input"] == 2 * (2 * 32 + projected + 64)


LATENT = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 24}
SPARSE = {"experts": 8, "experts_per_token": 2, "expert_ffn": 128, "shared_expert_ffn": 192}


def repeated(modules: list[str], model: dict[str, Any]) -> tuple[float, float]:
    """Bytes per token that F saves, and microseconds that I takes in addition."""
    sizes = {"hidden": 256, "heads": 4, "layers": 2, "ffn": 512, **model}
    config = estimate_config(llama(**sizes), recompute="selective", recompute_modules=modules)
    plain, again = (block := estimate_layers(config)[1]).plain, block.selective
    assert again is not None
    assert again.after_input == plain.after_input
    assert again.times.forward == plain.times.forward
    assert again.workspace >= plain.workspace
    added = again.times.backward_input - plain.times.backward_input
    return (plain.after_forward - again.after_forward) / 4096, added


def time_of(products: int, values: int) -> float:
    """Microseconds of products with so many weights, and of the traffic of so many values of a token."""
    return 4096 * 1e6 * (2 * products / 100e12 + 2 * values / 1e12)


@pytest.mark.parametrize(
    ("model", "modules", "dropped", "time"),
    [
        # Outputs of 256 values; a norm reads and writes a tensor. Others are parts of the next product.
        (LATENT, ["layernorm"], 2 * 256, time_of(0, 2 * 256)),
        ({**LATENT, **SPARSE}, ["layernorm"], 2 * 2 * 256, time_of(0, 2 * 2 * 256)),
        (LATENT, ["mla_up_proj"], 2 * 4 * (2 * 48 + 24), time_of(256 * 4 * 48 + 64 * 4 * 56, 4 * 4 * 48)),
        ({}, ["mlp"], 2 * (3 * 512 + 256), time_of(3 * 256 * 512, 3 * 512 + 2 * 256)),
        (SPARSE, ["moe_act"], 2 * 2 * 128, time_of(0, 3 * 2 * 128)),
        (SPARSE, ["shared_experts"], 2 * 3 * 192, time_of(3 * 256 * 192, 3 * 192)),
    ],
)
def test_modules_can_be_computed_again(
    model: dict[str, Any], modules: list[str], dropped: int, time: float
) -> None:
    assert repeated(modules, model) == pytest.approx((dropped, time))


def test_experts_as_a_whole_have_their_parts() -> None:
    whole, time = repeated(["moe"], SPARSE)
    assert whole == (4 + 1) * 8 + 2 * 2 * (256 + 3 * 128) + 2 * 3 * 192
    assert time > repeated(["shared_experts"], SPARSE)[1]
    assert repeated(["moe", "moe_act", "shared_experts"], SPARSE) == (whole, time)
