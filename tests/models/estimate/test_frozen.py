"""Frozen parts and LoRA against models of transformers: parameters, gradients, and torch's operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models.estimate.test_transformers import as_file, config_class
from support.estimates import DEVICE, llama, modern_configs
from zbv_models.estimate.config import EstimateConfig, estimate_config, estimate_layers, parse_config
from zbv_models.estimate.layers import LayerEstimate
from zbv_models.estimate.model import Transformer
from zbv_models.estimate.model_layers import (
    layer_kinds,
    model_flops,
    parameters_of,
    shapes_of,
    trained_parameters_of,
    training_text,
)
from zbv_models.estimate.shapes import Degrees, PerAction
from zbv_models.estimate.transformers_config import from_transformers
from zbv_solver.errors import InvalidInput

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LAYERS, SEQUENCE, RANK = 6, 128, 4
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 160, "num_key_value_heads": 2},
    "qwen3_moe": {
        "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
}  # fmt: skip
SIZES["gpt_neox"] = {"intermediate_size": 256}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


def adapt(linear: Any) -> None:
    """Add LoRA's two products to a linear layer."""
    linear.A = torch.nn.Linear(linear.in_features, RANK, bias=False)
    linear.B = torch.nn.Linear(RANK, linear.out_features, bias=False)
    linear.register_forward_hook(lambda module, given, output: output + module.B(module.A(given[0])))


def with_lora(model: Any, names: list[str]) -> None:
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if name.rpartition(".")[2] in names:
            adapt(module)


def all_but_head(model: Any) -> None:
    model.requires_grad_(False)
    for module in (model.lm_head, model.model.norm):
        module.requires_grad_(True)


def lower_half(model: Any) -> None:
    for module in (model.model.embed_tokens, *model.model.layers[: LAYERS // 2]):
        module.requires_grad_(False)


def upper_half(model: Any) -> None:
    for module in (model.model.norm, model.lm_head, *model.model.layers[LAYERS // 2 :]):
        module.requires_grad_(False)


PRODUCT = 2 * SEQUENCE * 64
"""Operations of a product of the stream with a matrix, per column."""
SCORES = 2 * SEQUENCE**2 * 64
"""Operations of attention's product with keys, and with values."""
INPUTS = PRODUCT * (64 + 2 * 32)
OF_FIRST = INPUTS + 3 * PRODUCT * RANK
CASES: list[tuple[str, dict[str, Any], Callable[[Any], None], float]] = [
    ("llama", {}, lambda model: None, 0),
    ("llama", {"frozen": ["embedding", "layers"]}, all_but_head, 0),
    ("llama", {"frozen": ["embedding", "0-2"]}, lower_half, 0),
    ("llama", {"frozen": ["3-5", "head"]}, upper_half, 0),
    ("llama", {"lora_rank": RANK, "target_modules": ["q_proj", "v_proj"]},
     lambda model: with_lora(model, ["q_proj", "v_proj"]), INPUTS + 2 * PRODUCT * RANK + SCORES),
    ("llama", {"lora_rank": RANK, "target_modules": ["attention"]},
     lambda model: with_lora(model, ATTENTION), OF_FIRST),
    ("llama", {"lora_rank": RANK}, lambda model: with_lora(model, ALL), OF_FIRST),
    ("llama", {"lora_rank": RANK, "target_modules": ["mlp"]}, lambda model: with_lora(model, ALL[4:]),
     INPUTS + PRODUCT * 64 + 4 * SCORES + 2 * PRODUCT * (160 + RANK)),
    ("qwen3_moe", {"frozen": ["embedding", "0-2"]}, lower_half, 0),
    ("qwen3_moe", {"lora_rank": RANK, "target_modules": ["attention"]},
     lambda model: with_lora(model, ATTENTION), OF_FIRST),
]  # fmt: skip
"""Type, keys of the section ``model``, the same for torch, and operations of I that torch leaves out.

These are of the first layer with adapters: what gives gradients that nothing below needs.
"""


def small(name: str) -> Any:
    common = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 200, "pad_token_id": 0}
    common |= {"num_hidden_layers": LAYERS, "tie_word_embeddings": False}
    return config_class(name)(**{**common, **SIZES[name]})


def read(config: Any, **keys: Any) -> Transformer:
    model = {"sequence": SEQUENCE, "attention": "plain", "causal": False}
    return Transformer.model_validate({**model, **from_transformers(as_file(config)), **keys})


def operations(work: Callable[[], Any]) -> tuple[Any, int]:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        found = work()
    return found, int(counter.get_total_flops())


@pytest.mark.parametrize(("name", "keys", "freeze", "unneeded"), CASES)
def test_what_trains_has_the_parameters_gradients_and_operations_of_torch(
    name: str, keys: dict[str, Any], freeze: Callable[[Any], None], unneeded: float
) -> None:
    config = small(name)
    made = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    freeze(made)
    tokens = torch.ones((1, SEQUENCE), dtype=torch.long)
    loss, forward = operations(lambda: made(input_ids=tokens, labels=tokens, use_cache=False).loss)
    _, backward = operations(loss.backward)

    model = read(config, **keys)
    every = list(made.parameters())
    assert parameters_of(model).total == sum(each.numel() for each in every)
    trained = sum(each.numel() for each in every if each.grad is not None)
    assert trained_parameters_of(model).total == trained
    layers = estimate_layers(as_config(model))
    found = sum(layer.flops.forward * layer.copies for layer in layers)
    assert found == pytest.approx(forward, rel=1e-9)
    again = sum((layer.flops.backward_input + layer.flops.backward_weight) * layer.copies for layer in layers)
    assert again == pytest.approx(backward + unneeded, rel=1e-9)
    assert model_flops(model) == pytest.approx(found + again)


def as_config(model: Transformer, **parallel: Any) -> EstimateConfig:
    return parse_config(
        {
            "model": model.model_dump(),
            "parallel": {"pp_degree": 1, "microbatches": 1, "precision": "mixed", **parallel},
            "device": {**DEVICE, "data_parallel_bandwidth": 1, "fp8_tflops": 150},
        }
    )


EXPERTS = {"experts": 8, "experts_per_token": 2, "expert_ffn": 96, "shared_expert_ffn": 64}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
VISION = {"hidden": 64, "layers": 3, "heads": 4, "patches": 16, "merged": 4, "images": 2}
COMPRESSED = {
    "window": 16, "index_heads": 2, "index_dim": 8, "head_dim": 16,
    "compressed": {"query_rank": 16, "output_groups": 2, "output_rank": 8, "ratio": 4, "chosen": 8},
}  # fmt: skip


def tiny(**more: Any) -> Transformer:
    return llama(hidden=64, layers=4, heads=4, ffn=96, vocabulary=200, sequence=64, **more)


def layers_of(model: Transformer, **parallel: Any) -> dict[str, LayerEstimate]:
    return {layer.name: layer for layer in estimate_layers(as_config(model, **parallel))}


@pytest.mark.parametrize(
    ("more", "modules", "count"),
    [
        ({}, [], 4 * RANK * (4 * 2 * 64 + 3 * (64 + 96))),
        ({}, ["linear_qkv", "linear_fc1"], 4 * RANK * (64 + 3 * 64 + 64 + 2 * 96)),
        (EXPERTS, ["experts"], 4 * 8 * RANK * 3 * (64 + 96)),
        (EXPERTS, ["mlp"], 4 * RANK * 3 * (64 + 64)),
        (EXPERTS, ["up_proj"], 4 * RANK * (8 * (64 + 96) + 64 + 64)),
        ({**EXPERTS, "dense_layers": 1}, ["experts"], 3 * 8 * RANK * 3 * (64 + 96)),
        (LATENT, ["attention"], 4 * RANK * (64 + 24 + 24 + 96 + 64 + 24 + 16 + 112 + 48 + 64)),
        ({"gated": False}, ["mlp"], 4 * RANK * 2 * (64 + 96)),
        (COMPRESSED, ["o_a_proj", "o_b_proj"], 4 * RANK * (2 * (32 + 8) + 16 + 64)),
        ({"frozen": ["2-3"]}, ["q_proj"], 2 * RANK * (64 + 64)),
        ({"layers_to_transform": ["0", "2-3"]}, ["q_proj"], 3 * RANK * (64 + 64)),
    ],
)
def test_adapters_have_r_parameters_per_input_and_output_on_any_number_of_devices(
    more: dict[str, Any], modules: list[str], count: int
) -> None:
    plain = tiny(**more)
    model = tiny(**{"lora_rank": RANK, "target_modules": modules, **more})
    assert parameters_of(model).total - parameters_of(plain).total == count
    whole = [parts_of(model, Degrees()), parts_of(model, Degrees(2, True, expert=2))]
    assert whole[0] == whole[1]


def parts_of(model: Transformer, degrees: Degrees) -> list[tuple[Any, Any]]:
    found = []
    for kind in layer_kinds(model):
        for _, half in kind.halves:
            part = half.part(shapes_of(model, kind, degrees))
            found.append((part.parameters, part.frozen))
    return found


def test_what_is_frozen_holds_its_parameters_alone_and_costs_nothing_per_step() -> None:
    keys = {"zero_stage": 1, "data_parallel": 4}
    whole, found = layers_of(tiny(), **keys), layers_of(tiny(frozen=["embedding", "0-1"]), **keys)
    for name in ("embedding", "block.0", "block.1"):
        static, parameters = found[name].static, found[name].parameters
        assert (static.parameters, static.gradients, static.optimizer) == (2 * parameters, 0, 0)
        assert found[name].step.total == 0
    assert {found[f"block.{place}"].static for place in (2, 3)} == {whole["block"].static}
    assert found["block.3"].step == whole["block"].step


def test_layers_below_those_with_adapters_have_no_backward() -> None:
    found = layers_of(tiny(lora_rank=RANK, layers_to_transform=["2-3"]))
    run_backward = [place for place in range(4) if found[f"block.{place}"].flops.backward_input]
    assert run_backward == [2, 3]


def test_replicas_reduce_and_update_adapters_alone() -> None:
    keys = {"data_parallel": 4, "zero_stage": 1}
    model = tiny(lora_rank=RANK)
    whole, found = layers_of(tiny(), **keys)["block"], layers_of(model, **keys)["block"]
    share = trained_parameters_of(model).total / 4 / whole.parameters
    for name in ("optimizer", "gradient_reduction", "parameter_gathering"):
        assert getattr(found.step, name) == pytest.approx(share * getattr(whole.step, name), rel=1e-3)
        assert getattr(found.step, name) > 0
    assert found.static.gradients == trained_parameters_of(model).total // 4 * 2
    assert found.static.parameters == 2 * found.parameters


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ({}, ""),
        ({"lora_rank": 2}, ", with adapters in 4 of 4 layers"),
        ({"frozen": ["embedding"]}, ""),
        ({"frozen": ["embedding", "0-1"]}, "; the first 3 layers have no I, and gradients"),
        ({"lora_rank": 2, "layers_to_transform": ["1-2"]}, ", with adapters in 2 of 4 layers; the first 2 l"),
        ({"lora_rank": 2, "pattern": "M(*-)M*", "state_space": {"parameters": 9, "flops": 9}},
         ", with adapters in 2 of 4 layers"),
    ],
)  # fmt: skip
def test_the_answer_says_which_layers_have_adapters_and_which_have_no_i(more: Any, found: str) -> None:
    text = training_text(tiny(**more))
    assert text.startswith(found)
    assert bool(text) == bool(found)


@pytest.mark.parametrize("stage", [2, 3])
def test_replicas_that_divide_parameters_gather_frozen_ones(stage: int) -> None:
    def exchanged(**more: Any) -> PerAction:
        return layers_of(tiny(**more), data_parallel=4, zero_stage=stage)["block"].exchanged

    whole, found = exchanged(), exchanged(frozen=["layers"])
    assert whole.backward_weight > 0 == found.backward_weight
    assert found.forward == whole.forward
    assert (found.forward > 0) == (stage == 3)


def test_a_frozen_encoder_runs_forwards_only_and_its_projector_trains() -> None:
    model = tiny(vision=VISION, frozen=["vision", "embedding"])
    whole, found = layers_of(tiny(vision=VISION)), layers_of(model)
    for name in ("patches", "vision"):
        layer, times = found[name], found[name].plain.times
        assert times == PerAction(whole[name].plain.times.forward)
        assert layer.flops == PerAction(whole[name].flops.forward)
        assert layer.full is None
        assert layer.plain.after_forward == layer.plain.after_input == 0
    assert {name: found[name] for name in ("projector", "block", "head")} == {
        name: whole[name] for name in ("projector", "block", "head")
    }
    assert found["embedding"].plain.times.backward_weight == 0
    of_encoder = sum(
        whole[name].parameters * whole[name].copies for name in ("patches", "vision", "embedding")
    )
    assert trained_parameters_of(model).total == parameters_of(model).total - of_encoder


def test_a_frozen_shared_table_is_not_reduced() -> None:
    model = {"tied_embeddings": True}
    keys = {"placement": "loop", "chunks": 1, "pp_degree": 2}
    found = [
        estimate_config(as_config(tiny(**model, **more), **keys)).table_reduction
        for more in ({}, {"frozen": ["embedding", "head"]}, {"lora_rank": 2})
    ]
    assert found[0] > 0 == found[1] == found[2]


@pytest.mark.parametrize(("module", "gathers"), [("q_proj", True), ("gate_proj", True), ("o_proj", False)])
def test_adapters_of_what_is_gathered_gather_it_again(module: str, gathers: bool) -> None:
    def exchanged(**more: Any) -> float:
        found = layers_of(tiny(**more), tensor_parallel=2, sequence_parallel=True)["block"]
        return found.exchanged.backward_weight

    of_adapters = exchanged(lora_rank=2, target_modules=[module])
    assert exchanged() > 0 == exchanged(frozen=["layers"])
    assert (of_adapters > 0) == gathers


def test_narrow_operands_of_frozen_matrices_are_stored_once() -> None:
    """By rows for F and I; W would need them by columns, too."""
    narrow = tiny(product_dtype="fp8")
    times = [
        layers_of(tiny(product_dtype="fp8", **more))["block"].plain.times
        for more in ({}, {"frozen": ["layers"]})
    ]
    inputs = 64 + 4 * 64 // 4 + 64 + 96  # per token, of the four products
    saved = narrow.sequence * inputs / DEVICE["memory_bandwidth"] / 1e3  # us
    assert times[0].forward - times[1].forward == pytest.approx(saved)


@given(config=modern_configs(), word=st.sampled_from(("embedding", "layers", "head")))
@settings(max_examples=40, deadline=None)
def test_freezing_makes_no_number_larger(config: EstimateConfig, word: str) -> None:
    frozen = config.model.model_copy(update={"frozen": (word,)})
    layers = estimate_layers(config.model_copy(update={"model": frozen}))
    for whole, found in zip(estimate_layers(config), layers, strict=True):
        assert found.parameters == whole.parameters
        assert found.static.total <= whole.static.total
        assert found.step.total <= whole.step.total
        for before, after in ((whole.plain, found.plain), (whole.full, found.full)):
            if before is None or after is None:
                continue
            for action, time in vars(after.times).items():
                assert time <= getattr(before.times, action) * (1 + 1e-9)
            assert after.after_forward <= before.after_forward
            assert after.after_input <= before.after_input
    assert model_flops(frozen) < model_flops(config.model) or word == "embedding"


@pytest.mark.parametrize("more", [{}, EXPERTS, LATENT, COMPRESSED])
def test_frozen_blocks_in_nf4_hold_4_127_bits_per_value_and_tables_and_adapters_what_they_did(
    more: dict[str, Any],
) -> None:
    """Dettmers et al. 2023, §3: constants take 8 / 64 + 32 / (64 * 256) bits per value."""
    keys = {"lora_rank": RANK, **more}
    wide, found = layers_of(tiny(**keys)), layers_of(tiny(**keys, frozen_dtype="nf4"))
    assert {name: found[name] for name in ("embedding", "head")} == {
        name: wide[name] for name in ("embedding", "head")
    }
    before, after = (
        next(layers[name] for name in layers if layers[name].copies > 1) for layers in (wide, found)
    )
    of_adapters = trained_parameters_of(tiny(**keys)).total // 4
    frozen = before.parameters - of_adapters
    assert after.static.parameters == pytest.approx(2 * of_adapters + frozen * 4.127 / 8, rel=1e-4)
    assert (after.static.gradients, after.static.optimizer) == (
        before.static.gradients,
        before.static.optimizer,
    )
    assert (after.parameters, after.flops, after.step) == (before.parameters, before.flops, before.step)
    assert after.plain.after_forward == before.plain.after_forward


def test_f_and_i_make_the_values_of_packed_matrices_one_matrix_at_a_time() -> None:
    """They read 4.127 bits and write 16, of four products with the stream and three of the MLP."""
    wide, found = (
        layers_of(tiny(lora_rank=RANK, **more))["block"].plain for more in ({}, {"frozen_dtype": "nf4"})
    )
    bandwidth = DEVICE.get("product_bandwidth") or DEVICE["memory_bandwidth"]
    time = (4 * 64 * 64 + 3 * 64 * 96) * (2 + 4.127 / 8) / bandwidth / 1e3  # us
    more = [found.times.forward - wide.times.forward]
    more.append(found.times.backward_input - wide.times.backward_input)
    assert more == pytest.approx([time, time], rel=1e-4)
    assert found.times.backward_weight == wide.times.backward_weight
    assert found.workspace - wide.workspace == 2 * 64 * 96


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_replicas_divide_and_gather_packed_matrices_as_they_are(stage: int) -> None:
    def of(**more: Any) -> LayerEstimate:
        model = tiny(frozen=["layers"], **more)
        return layers_of(model, data_parallel=4, zero_stage=stage)["block"]

    wide, found = of(), of(frozen_dtype="nf4")
    share = 4.127 / 16
    assert found.static.parameters == pytest.approx(share * wide.static.parameters, rel=1e-3)
    for action, time in vars(wide.exchanged).items():
        assert getattr(found.exchanged, action) == pytest.approx(share * time, rel=1e-4)


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"frozen": ["all"]}, "/model/frozen", "nothing trains"),
    ({"frozen": ["embedding", "0-3", "head"]}, "/model/frozen", "nothing trains"),
    ({"frozen": ["2-4"]}, "/model/frozen", "layers 0 to 3"),
    ({"frozen": ["3-2"]}, "/model/frozen", "the first and the last"),
    ({"frozen": ["vision"]}, "/model/frozen", "found vision; the model has none"),
    ({"frozen": ["predictions"]}, "/model/frozen", "found predictions; the model has none"),
    ({"frozen": ["head"], "tied_embeddings": True}, "/model/frozen", "Freeze both or neither"),
    ({"frozen": ["tables"]}, "/model/frozen/0", "Use all, layers, embedding, head"),
    ({"frozen": ["layres"]}, "/model/frozen/0", "Did you mean layers"),
    ({"layers_to_transform": ["0"]}, "/model/layers_to_transform", "Give lora_rank"),
    ({"lora_rank": 4, "layers_to_transform": ["first"]}, "/model/layers_to_transform/0", "as in 0-15"),
    ({"lora_rank": 4, "layers_to_transform": ["4"]}, "/model/layers_to_transform", "from 0 to 3"),
    (
        {"lora_rank": 4, "frozen": ["0-1"], "layers_to_transform": ["1-2"]},
        "/model/layers_to_transform",
        "1-2",
    ),
    ({"target_modules": ["q_proj"]}, "/model/target_modules", "Give lora_rank"),
    ({"frozen_dtype": "nf4"}, "/model/frozen_dtype", "Give frozen or lora_rank"),
    ({"frozen_dtype": "nf4", "frozen": ["embedding"]}, "/model/frozen_dtype", "none is frozen"),
    ({"lora_rank": 4, "frozen": ["embedding"]}, "/model/lora_rank", "none is frozen"),
    ({"lora_rank": 4, "target_modules": ["experts"]}, "/model/target_modules", "Name some of all-linear"),
    ({"lora_rank": 4, "target_modules": ["q_a_proj"]}, "/model/target_modules", "found q_a_proj"),
    ({"lora_rank": 4, "target_modules": ["query"]}, "/model/target_modules/0", "all-linear"),
]


@pytest.mark.parametrize(("more", "pointer", "words"), WRONG)
def test_nonsense_is_refused_by_name(more: dict[str, Any], pointer: str, words: str) -> None:
    document = {**tiny().model_dump(), **more}
    parallel = {"pp_degree": 1, "microbatches": 1}
    with pytest.raises(InvalidInput) as caught:
        parse_config({"model": document, "parallel": parallel, "device": DEVICE})
    (issue,) = caught.value.issues
    assert (issue.pointer, words in issue.detail) == (pointer, True), issue
