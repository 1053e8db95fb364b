"""Reading ``config.json`` against transformers itself: parameters, operations of F, keys and defaults."""

from __future__ import annotations

import dataclasses
import json
from importlib import import_module
from typing import Any

import pytest
from zbv_models.estimate.families import TEXT_KINDS, VISION_KINDS, WRAPPERS
from zbv_models.estimate.model import Transformer
from zbv_models.estimate.model_layers import layer_kinds, parameters_of, shapes_of
from zbv_models.estimate.shapes import Degrees
from zbv_models.estimate.transformers_config import from_transformers
from zbv_models.estimate.transformers_keys import defaults
from zbv_solver.documents.validation import validated
from zbv_solver.errors import InvalidInput

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LAYERS = 6
NOT_OF_TRANSFORMERS = {
    *("baichuan", "bailing_moe", "bailing_moe_v2", "deepseek", "exaone", "internlm2", "minicpm"),
    *("deepseek_ref", "kimi_k2", "kimi_k3", "kimi_vl", "mimo", "mimo_v2", "mimo_v2_omni", "minimax_m1"),
    *("NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Nano_VL_V2", "NemotronH_Super_Omni_Reasoning_V3"),
    "minimax_m3",
    *("minimax_text_01", "moonvit", "nemotron-nas"),
}
"""Types whose code is in their own repositories."""
COMPLETED: dict[str, dict[str, Any]] = {
    "dbrx": {"attn_config": {"kv_n_heads": 8, "rope_theta": 5e5}, "ffn_config": {"hidden_size": 2048}},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
              "first_k_dense_replace": 1},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 8, "moe_topk": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 3},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 3},
    "longcat_flash": {"zero_expert_num": 0},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 48},
    "qwen2_moe": {"sliding_window": 4096},
}  # fmt: skip
"""Classes whose defaults alone make no model, or one with matrices that nothing uses."""
TEXT_CLASSES = {
    "mllama_text_model": ("mllama", "MllamaTextModel"),
    "step3p5": ("step3p7", "Step3p7TextModel"),
}
"""Language models that only wrappers use: the module and the class, without a head."""
SMALL: dict[str, Any] = {
    "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 768,
    "vocab_size": 1000, "moe_intermediate_size": 128, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "topk_group": 1, "n_group": 1}
VARIANTS: list[dict[str, Any]] = [
    {"tie_word_embeddings": True, "attention_bias": True, "num_key_value_heads": 8, "num_experts": 8,
     "first_k_dense_replace": 3, "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2,
     "q_lora_rank": 64, "kv_lora_rank": 32, **EXPERTS},
    {"tie_word_embeddings": False, "mlp_bias": True, "num_key_value_heads": 1, "n_routed_experts": 8,
     "mlp_only_layers": [1, 4], "interleave_moe_layer_step": 2, "n_shared_experts": 2, **EXPERTS},
    {"head_dim": 32, "num_local_experts": 8, "decoder_sparse_step": 2,
     "shared_expert_intermediate_size": 96, "linear_num_value_heads": 16, "linear_value_head_dim": 64,
     "index_topk": 16, "index_n_heads": 4, "index_head_dim": 32, **EXPERTS},
]  # fmt: skip
"""Every key has another value than in ``SMALL`` in one of these."""
ALWAYS: dict[str, dict[str, Any]] = {
    "dbrx": {"tie_word_embeddings": False},
    "glm5_next_text": {"num_key_value_heads": 8},
    "nemotron_h": {"tie_word_embeddings": False},
    "deepseek_v4": {"n_shared_experts": 1},
}
"""What transformers makes of these types, whatever the file says."""


def config_class(name: str) -> Any:
    return transformers.models.auto.configuration_auto.CONFIG_MAPPING[name]


def fields(name: str) -> dict[str, Any]:
    return {field.name: field for field in dataclasses.fields(config_class(name))}


def count_key(name: str) -> str:
    return next(
        (key for key in ("n_layer", "num_layers", "n_layers") if key in fields(name)), "num_hidden_layers"
    )


def made(name: str, **changes: Any) -> Any:
    """A configuration of a type, with the changes that its class has fields for."""
    values = {count_key(name): LAYERS, **COMPLETED.get(name, {}), **changes}
    return config_class(name)(**{key: value for key, value in values.items() if key in fields(name)})


def as_file(config: Any) -> Any:
    return json.loads(json.dumps(config.to_dict()))


def counted_by_transformers(config: Any) -> int:
    """The parameters of the model of a configuration; of a type without a model by itself, with a head."""
    if config.model_type in TEXT_CLASSES:
        module, name = TEXT_CLASSES[config.model_type]
        made_class = getattr(import_module(f"transformers.models.{module}.modeling_{module}"), name)
        with torch.device("meta"):
            body = sum(weight.numel() for weight in made_class(config).parameters())
        return int(body + (0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size))
    seeing = config.model_type in WRAPPERS
    for auto in ("AutoModelForImageTextToText",) if seeing else ("AutoModelForCausalLM", "AutoModel"):
        auto_class = getattr(transformers, auto)
        if type(config) in auto_class._model_mapping:
            with torch.device("meta"):
                count: int = sum(weight.numel() for weight in auto_class.from_config(config).parameters())
                untied = auto == "AutoModel" and not as_file(config).get("tie_word_embeddings")
                return count + (int(config.vocab_size) * int(config.hidden_size) if untied else 0)
    raise AssertionError(f"transformers has no model for {config.model_type}")


def built(document: dict[str, Any]) -> Transformer:
    return Transformer.model_validate({"sequence": 1024, **from_transformers(document)})


def counted(document: dict[str, Any]) -> int:
    return parameters_of(built(document), with_predictions=False).total


@pytest.mark.parametrize("name", sorted(set(TEXT_KINDS) - NOT_OF_TRANSFORMERS))
def test_a_type_and_its_variants_have_the_parameters_that_transformers_counts(name: str) -> None:
    """zbv leaves out single biases, norms across heads and attention sinks: less than one in 10,000."""
    config, keys = made(name), as_file(made(name))
    assert counted(keys) == pytest.approx(counted_by_transformers(config), rel=1e-4)
    if name != "nemotron_h":  # which needs its layers; other files may leave out what their class defines
        few = {"model_type": name, count_key(name): LAYERS, **COMPLETED.get(name, {})}
        assert (built(few).stream, layer_kinds(built(few))) == (built(keys).stream, layer_kinds(built(keys)))
    for changes in VARIANTS:
        config = made(name, **{**SMALL, **changes, **ALWAYS.get(name, {})})
        expected = counted_by_transformers(config)
        assert counted(as_file(config)) == pytest.approx(expected, rel=2e-3), changes


@pytest.mark.parametrize(("name", "key"), [
    ("gpt_neox", "attention_bias"), ("seed_oss", "attention_bias"), ("seed_oss", "mlp_bias"),
])  # fmt: skip
def test_a_bias_counts_if_the_file_has_it(name: str, key: str) -> None:
    """Within a bias of one value per hidden unit and layer, which zbv ties to that of the MLP."""
    with_bias, without = (made(name, **{**SMALL, key: has}) for has in (True, False))
    expected = counted_by_transformers(with_bias) - counted_by_transformers(without)
    found = counted(as_file(with_bias)) - counted(as_file(without))
    assert found == pytest.approx(expected, rel=0, abs=LAYERS * SMALL["hidden_size"])
    assert found > 0


def test_recorded_defaults_are_those_of_transformers() -> None:
    for name in sorted({*TEXT_KINDS, *VISION_KINDS, *WRAPPERS} - NOT_OF_TRANSFORMERS):
        for key, value in defaults().get(name, {}).items():
            field = fields(name)[key]
            default = field.default_factory() if field.default is dataclasses.MISSING else field.default
            assert value == (list(default) if isinstance(default, tuple) else default), (name, key)


WIDE = {"text_config": {"hidden_size": 3584, "num_hidden_layers": 8}}
NARROW = {"text_config": {"hidden_size": 2048, "num_hidden_layers": 8},
          "vision_config": {"out_hidden_size": 2048}}  # fmt: skip
SEEN: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("glm46v", "glm4v", "llava", "mistral3")},
    **dict.fromkeys(("qwen2_vl", "qwen3_5", "qwen3_vl"), WIDE),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_vl_moe"), NARROW),
    "qwen2_5_vl": {**WIDE, "vision_config": {"hidden_size": 1280}},
    "glm4v_moe": {"text_config": {"num_hidden_layers": 4}},
    "gemma3": {"vision_config": {"model_type": "siglip_vision_model", "image_size": 896, "patch_size": 14,
                                 "vision_use_head": False}},
    "gemma4": {"text_config": {"num_hidden_layers": 12}, "vision_config": {"num_hidden_layers": 2}},
    "kimi_k25": {"text_config": {"model_type": "deepseek_v3", "num_hidden_layers": 4}},
    "llama4": {"text_config": {"num_hidden_layers": 4},
               "vision_config": {"hidden_size": 1408, "num_hidden_layers": 34, "intermediate_size": 5632,
                                 "image_size": 336, "vision_output_dim": 4096}},
}  # fmt: skip
"""Wrappers with sizes that fit together."""


def wrapped(name: str) -> tuple[Any, dict[str, Any]]:
    """The configuration of a wrapper and its file, with a size of images."""
    config = config_class(name)(**SEEN[name])
    document = as_file(config)
    if name in ("qwen2_5_vl", "qwen2_vl"):
        document["vision_config"]["image_size"] = 448
    if name == "gemma4":
        document["vision_config"]["default_output_length"] = 280
    return config, document


TIES = [(None, None), (None, True), (False, None), (True, None), (False, True), (True, False)]
UNTIED_AS_PUBLISHED = ("kimi_k25", "mistral3")
"""Their classes tie embedding and head unless a file says no; files that say nothing are of untied models."""


@pytest.mark.parametrize("name", SEEN)
def test_a_model_with_a_vision_encoder_has_the_parameters_that_transformers_counts(name: str) -> None:
    """zbv leaves out a class token, norms before the first block and single norms of projectors."""
    config, document = wrapped(name)
    assert counted(document) == pytest.approx(counted_by_transformers(config), rel=1e-4)
    assert counted({**document, "vision_config": None}) < counted(document)
    others = ("tie_word_embeddings", "layer_types", "moe_layers", "per_layer_config")
    text = {key: value for key, value in document["text_config"].items() if key not in others}
    seen = document["vision_config"]
    for outer, inner in TIES:
        if outer is None and name in UNTIED_AS_PUBLISHED:
            continue
        of_text, of_file = ({} if tied is None else {"tie_word_embeddings": tied} for tied in (inner, outer))
        rest = {key: value for key, value in document.items() if key != "tie_word_embeddings"}
        vision = {key: 2 if key == "num_hidden_layers" else value for key, value in seen.items()}
        file = {**rest, "text_config": {**text, "num_hidden_layers": 4, **of_text}, **of_file}
        file["vision_config"] = vision
        expected = counted_by_transformers(config_class(name)(**json.loads(json.dumps(file))))
        assert counted(file) == pytest.approx(expected, rel=2e-3), (outer, inner)
    if WRAPPERS[name].flat:  # published files have the text's keys next to ``vision_config``
        flat = {**document["text_config"], "model_type": name, "vision_config": document["vision_config"]}
        assert built(flat) == built(document)
        with pytest.raises(InvalidInput, match="/wormholes_per_block"):
            from_transformers({**flat, "wormholes_per_block": 3})


RUBBISH: list[Any] = [1.5, "x", [], {}, -1, True, [[1]], None]


@pytest.mark.parametrize("name", sorted({*TEXT_KINDS, *SEEN} - NOT_OF_TRANSFORMERS))
def test_rubbish_in_any_key_is_refused_by_its_name_or_has_no_effect(name: str) -> None:
    """Without a value, a key may make others useless or contradict them; those are named then."""
    document = as_file(made(name)) if name in TEXT_KINDS else wrapped(name)[1]
    sections = [(), *((key,) for key in ("text_config", "vision_config") if key in document)]
    for section in sections:
        inner = document[section[0]] if section else document
        # Every other key gets the one half of the values, and in another type perhaps the other half.
        wrong = [(key, value) for at, key in enumerate(inner) for value in RUBBISH[at % 2 :: 2]]
        for key, value in [("wormholes", 3), *wrong]:
            changed = {**inner, key: value}
            try:
                read = from_transformers({**document, section[0]: changed} if section else changed)
            except InvalidInput as error:
                named = {issue.pointer for issue in error.issues}
                assert value in (None, {}, []) or named == {"/".join(["", *section, key])}, (key, value)
                continue
            assert key != "wormholes"
            validated(Transformer, {"sequence": 8, **read})


TYPES = (
    "afmoe apertus deepseek_v3 deepseek_v32 deepseek_v4 dots1 ernie4_5_moe exaone4 gemma gemma2 gemma3_text "
    "gemma4_text gpt_bigcode gpt_neox gpt_oss gptj granite_swa granitemoe_swa granitemoeshared hy_v3 laguna "
    "llama mimo_v2_flash minimax_m2 minimax_m3_vl_text mistral mixtral nanochat nemotron olmoe phi phi3 "
    "qwen2 qwen2_moe qwen3 qwen3_moe solar_open"
)
"""All that the worker trains, and one or more for each formula of attention and of experts."""
RECURRENT = "bailing_hybrid bamba jamba kimi_linear lfm2 lfm2_moe minimax nemotron_h olmo_hybrid qwen3_5_text"
"""Types with layers of given costs, whose recurrence transformers computes by tokens, or in other chunks."""
SIZES: dict[str, Any] = {
    **SMALL, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "vocab_size": 128,
    "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "q_lora_rank": 32, "kv_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "num_experts": 8, "n_routed_experts": 8,
    "num_local_experts": 8, "index_n_heads": 2, "index_head_dim": 16, "o_lora_rank": 16, "o_groups": 2,
    "sliding_window": 16, "vocab_size_per_layer_input": 128, "mamba_chunk_size": 16, "mamba_d_state": 16,
    "linear_num_heads": 4, "linear_head_dim": 16, **EXPERTS,
}  # fmt: skip
LATENT = {"num_key_value_heads": 4}
LEFT_OUT = {"deepseek_v32": 0.005, "qwen2_moe": 1e-4}
"""Weights of the indexer's heads, and a gate of one value per token."""


def counted_by_torch(name: str, length: int) -> tuple[Any, dict[str, int]]:
    """A small file of a type, and operations of a forward by names of torch's functions.

    Experts get as many tokens as the router sends them.
    """
    from torch.utils.flop_counter import FlopCounterMode

    config = made(name, **{**SIZES, **(LATENT if "kv_lora_rank" in fields(name) else {})})
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    tokens = torch.ones((1, length), dtype=torch.long)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=tokens, use_cache=False)
    found = counter.get_flop_counts()["Global"]
    return as_file(config), {str(function): int(count) for function, count in found.items()}


def operations(document: Any, length: int, *, with_scores: bool = True) -> float:
    """With all scores computed."""
    read = {"sequence": length, "attention": "plain", "causal": False, **from_transformers(document)}
    model = Transformer.model_validate({**read, "prediction_layers": 0})
    total, n = 0.0, model.residual_streams
    for kind in layer_kinds(model):
        for _, half in kind.halves:
            part = half.part(shapes_of(model, kind, Degrees()))
            products = sum(product.flops for product in part.products)
            total += kind.count * (products + (part.core.forward if with_scores else 0))
    # The mix of streams is a product in transformers; zbv counts its memory traffic.
    return total + (2 * model.layers * 2 * length * n * n * model.hidden if n > 1 else 0)


@pytest.mark.parametrize("name", TYPES.split())
def test_a_forward_has_the_operations_that_torch_counts(name: str) -> None:
    length = 128 if name == "deepseek_v4" else 32  # it compresses 128 tokens to one
    document, by_function = counted_by_torch(name, length)
    expected = sum(by_function.values())
    assert operations(document, length) == pytest.approx(expected, rel=LEFT_OUT.get(name, 1e-9))


@pytest.mark.parametrize("name", RECURRENT.split())
def test_layers_without_attention_have_the_products_with_weights_that_torch_counts(name: str) -> None:
    document, by_function = counted_by_torch(name, 32)
    expected = by_function["aten.mm"] + by_function.get("aten.addmm", 0)
    assert operations(document, 32, with_scores=False) == pytest.approx(expected, rel=1e-9)
