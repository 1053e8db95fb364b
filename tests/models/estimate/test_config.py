"""Reading configurations, presets and ``config.json``: defaults, published sizes, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from support.estimates import Document
from support.paths import ROOT
from zbv_models.estimate import times
from zbv_models.estimate.config import ParallelConfig, Precision, parse_config, problem_document
from zbv_models.estimate.device import Device
from zbv_models.estimate.families import TEXT_KINDS, WRAPPERS
from zbv_models.estimate.model import Transformer
from zbv_models.estimate.model_layers import expert_degree, parameters_of
from zbv_models.estimate.sections import preset, preset_names, with_presets
from zbv_models.estimate.transformers_config import from_transformers
from zbv_solver.documents.validation import validated
from zbv_solver.errors import InvalidInput
from zbv_solver.problem.reading import parse_any_problem

SECTIONS: dict[str, Document] = {
    "model": {"hidden": 512, "layers": 4, "heads": 8, "vocabulary": 1000, "sequence": 128},
    "parallel": {"pp_degree": 2, "microbatches": 4},
    "device": {"achieved_tflops": 100},
}
SEEING = {"hidden": 64, "layers": 2, "heads": 4, "patches": 4}
SPARSE = {"experts": 8, "experts_per_token": 2}
COMPRESSED = {"query_rank": 64, "output_groups": 2, "output_rank": 32, "ratio": 4}
SP = {"tensor_parallel": 4, "sequence_parallel": True}


def document(**sections: Document) -> Document:
    return {name: {**section, **sections.get(name, {})} for name, section in SECTIONS.items()}


def issues(broken: Any) -> dict[str, str]:
    with pytest.raises(InvalidInput) as raised:
        parse_config(broken)
    details: dict[str, str] = {}
    for issue in raised.value.issues:
        details[issue.pointer] = details.get(issue.pointer, "") + issue.detail
    return details


def test_the_defaults_are_a_gpt_in_the_precision_of_its_type() -> None:
    config = parse_config(document())
    model = config.model
    assert (model.n_kv_heads, model.width_of_head, model.ffn_width) == (8, 64, 2048)
    assert model.has_qkv_bias
    assert config.precision == Precision(parameters=2, gradients=4, master=4, state=4)
    assert (config.state.updated(), config.placement) == (4 + 2 * 4, "auto")
    single = parse_config(document(model={"dtype": "float32", "tied_embeddings": True}))
    assert single.precision == Precision(parameters=4, gradients=4, master=0, state=4)
    assert single.placement == "v"
    sizes = {"parameters": 1, "gradients": 2, "master": 4, "state": 1.5}
    parallel = {"placement": "loop", "precision": sizes}
    chosen = parse_config(document(model={"tied_embeddings": True}, parallel=parallel))
    assert (chosen.placement, chosen.precision) == ("loop", Precision(**sizes))


@pytest.mark.parametrize(("model", "parallel", "pointer", "says"), [
    ({"hidden": 512.0}, {}, "/model/hidden", "found 512.0; input should be a valid integer"),
    ({"hiden": 1}, {}, "/model/hiden", "unknown key"),
    ({"layers": 511}, {}, "/model/layers", "found 511; must be at most 510."),
    ({"layers": 256}, {"granularity": "half"}, "/model/layers", "most 255. Use granularity block."),
    ({"prediction_layers": 10**8}, {}, "/model/layers", "100000000 as prediction_layers; together"),
    ({"heads": 7}, {}, "/model/heads", "must divide hidden (512). Or give head_dim"),
    ({"kv_heads": 3}, {}, "/model/kv_heads", "found 3; must divide heads (8)"),
    ({}, {"precision": "fp8"}, "/parallel/precision", "'mixed-fp32-gradients'"),
    ({}, {"precision": {}}, "/parallel/precision/master", "required and absent"),
    ({}, {"recompute": "selective"}, "/parallel/recompute", "flash keeps none. Use full"),
    *(({}, {"recompute": "selective", **wrong}, "/parallel/recompute_modules", "Name op alone")
      for wrong in ({"recompute_modules": ["op", "mlp"]},
                    {"recompute_modules": ["op"], "granularity": "half"})),
    # Keys that need others.
    ({"kv_lora_rank": 64}, {}, "/model/v_head_dim", "latent attention (kv_lora_rank) needs it"),
    ({"q_lora_rank": 64}, {}, "/model/q_lora_rank", "belongs to latent attention. Give kv_lora_rank"),
    ({"full_attention_every": 2}, {}, "/model/full_attention_every", "Give window"),
    ({"experts": 8}, {}, "/model/experts_per_token", "how many a token is sent to"),
    ({"experts": 8, "experts_per_token": 9}, {}, "/model/experts_per_token", "at most experts (8)"),
    ({"expert_ffn": 64}, {}, "/model/expert_ffn", "Give experts, their number"),
    ({**SPARSE, "dense_layers": 4}, {}, "/model/dense_layers", "less than layers (4)"),
    ({"pattern": "BB"}, {}, "/model/pattern", "found 2 layers; must have one for each"),
    ({"pattern": "BBXB"}, {}, "/model/pattern", "found 'BBXB'"),
    ({"pattern": "BBaB"}, {}, "/model/pattern", "found a; a lower-case letter must be that of one of the"),
    *(({"pattern": "a*BB", "variants": [{"letter": "a", "like": "*", **wrong}] * times}, {}, pointer, says)
      for wrong, times, pointer, says in (
          ({}, 2, "/model/variants/1/letter", "found a again; must have another letter"),
          ({"kv_heads": 3}, 1, "/model/variants/0/kv_heads", "found 3; must divide heads (8)"),
          ({"compressed": COMPRESSED}, 1, "/model/window", "compressed attention needs it"),
          ({"compressed": {**COMPRESSED, "chosen": 8}}, 1, "/model/index_heads", "attention needs it"),
          ({"compressed": {**COMPRESSED, "output_groups": 3}, "window": 8}, 1,
           "/model/variants/0/compressed/output_groups", "found 3; must divide heads (8)"),
          ({"compressed": {**COMPRESSED, "ratio": None, "chosen": 8}}, 1,
           "/model/variants/0/compressed/chosen", "Give ratio"))),
    ({"pattern": "MB*-"}, {}, "/model/state_space", "layers M of the pattern need it"),
    ({"pattern": "EB*-"}, {}, "/model/experts", "layers E of the pattern need it"),
    ({"state_space": {"parameters": 1, "flops": 1.0}}, {}, "/model/state_space", "Give pattern"),
    ({"vision": {**SEEING, "hidden": 9}}, {}, "/model/vision/heads", "(9)"),
    ({"vision": {**SEEING, "full_attention": [0]}}, {}, "/model/vision/full_attention", "Give window"),
    ({"vision": {**SEEING, "window": 2, "full_attention": [2]}}, {}, "/model/vision/full_attention",
     "found 2; must be below the encoder's layers (2)"),
    ({"vision": {**SEEING, "projector": [], "projector_gated": True}}, {},
     "/model/vision/projector_gated", "a projector of one matrix has no gate"),
    ({"product_dtype": "fp8"}, {}, "/device/fp8_tflops", "product_dtype fp8 needs it"),
    # Devices that share.
    ({"heads": 9, "hidden": 576, "kv_heads": 3}, SP, "/parallel/tensor_parallel", "must divide heads"),
    ({"kv_heads": 1}, SP, "/parallel/tensor_parallel", "must divide kv_heads"),
    ({"ffn": 1001}, SP, "/parallel/tensor_parallel", "must divide ffn"),
    ({"pattern": "(*a)BBB", "variants": [{"letter": "a", "like": "-", "ffn": 1001}]}, SP,
     "/parallel/tensor_parallel", "must divide ffn of variant a (1001)"),
    ({"vocabulary": 1001}, SP, "/parallel/tensor_parallel", "vocabulary (1001). Pad it to 1004."),
    ({"sequence": 127}, SP, "/parallel/tensor_parallel", "must divide sequence"),
    ({"vision": {**SEEING, "hidden": 66, "heads": 6}}, SP, "/parallel/tensor_parallel", "the heads"),
    ({"vision": {**SEEING, "ffn": 66}}, SP, "/parallel/tensor_parallel", "the ffn of vision"),
    ({}, {"context_parallel": 3}, "/parallel/context_parallel", "so 6 must divide sequence (128)"),
    ({}, {**SP, "context_parallel": 32}, "/parallel/context_parallel", "so 256 must divide"),
    ({"attention": "plain"}, {"context_parallel": 2}, "/parallel/context_parallel", "Use flash"),
    ({}, {"context_parallel": 2}, "/device/context_parallel_bandwidth", "needs it, or link_bandwidth"),
    ({}, {"expert_parallel": 2}, "/parallel/expert_parallel", "the model has no experts"),
    (SPARSE, {"expert_parallel": 3, "data_parallel": 3}, "/parallel/expert_parallel", "experts (8)"),
    (SPARSE, {"expert_parallel": 4}, "/parallel/expert_parallel", "devices of a rank"),
    (SPARSE, {"expert_parallel": 4, "data_parallel": 4, "expert_parallel_in_node": 3},
     "/parallel/expert_parallel_in_node", "must divide expert_parallel (4)"),
    (SPARSE, {"expert_parallel": 4, "data_parallel": 4, "expert_parallel_in_node": 2},
     "/device/tensor_parallel_bandwidth", "expert_parallel_in_node needs it"),
    (SPARSE, {"tensor_parallel": 2}, "/parallel/sequence_parallel", "needs sequence parallelism"),
])  # fmt: skip
def test_broken_rules_are_reported(model: Document, parallel: Document, pointer: str, says: str) -> None:
    assert says in issues(document(model=model, parallel=parallel))[pointer]


def test_all_broken_rules_are_reported_at_once() -> None:
    several = issues(document(model={"heads": 12, "kv_heads": 5}, parallel={"tensor_parallel": 7}))
    keys = ("model/heads", "model/kv_heads", "parallel/tensor_parallel", "device/tensor_parallel_bandwidth")
    assert set(several) == {f"/{key}" for key in keys}
    device = {"memory_limit": -1, "tensor_parallel_overlap": 1.5, "memory_bandwidth": float("nan")}
    missing = issues({"model": {}, "device": device})
    of_device = {f"/device/{key}" for key in (*device, "achieved_tflops")}
    assert {"/model/hidden", "/parallel", *of_device} <= set(missing)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_names_its_source_and_is_valid(name: str) -> None:
    entry, device = preset(name), preset(name).device
    assert entry.about
    assert entry.source
    if entry.model:
        parse_any_problem(problem_document(parse_config(with_presets({}, [name], {}))))
    else:
        assert parse_config(with_presets(document(), [], {"device": device})).device.memory_limit
    if "achieved_tflops" in device:
        assert device["achieved_tflops"] < device["peak_tflops"]
    if "kernel_latency" in device:  # the constants of the curve; the rates are those of the data sheet
        ultra = dict.fromkeys(("b300", "gb300"), times.ULTRA_ATTENTION_SHARE)
        attention = {**ultra, "mi300x": 0.61}.get(name, times.ATTENTION_SHARE)
        assert (device["kernel_latency"], device["attention_share"]) == (times.KERNEL_LATENCY, attention)
        assert (device["tensor_parallel_latency"], device["tensor_parallel_step_latency"]) == (8.4, 3.4)
        assert device["processors"] > 50
        assert 0.5 < device["achieved_tflops"] / times.SUSTAINED_SHARE / device["peak_tflops"] < 0.9
        reached = 0.75 * device["memory_bandwidth"] / times.TRAFFIC_SHARE
        assert device["product_bandwidth"] == pytest.approx(reached, rel=5e-3)
        assert device.get("fp8_tflops", float("inf")) > 1.7 * device["achieved_tflops"]


def test_the_user_s_keys_replace_the_preset_s_and_flags_replace_both() -> None:
    own = {"presets": ["llama-3.1-8b"], "model": {"sequence": 4096, "layers": 16}}
    config = parse_config(with_presets(own, ["a100-80gb"], {"model": {"layers": 8}}))
    assert (config.model.hidden, config.model.sequence, config.model.layers) == (4096, 4096, 8)
    assert config.device.achieved_tflops == preset("a100-80gb").device["achieved_tflops"]


@pytest.mark.parametrize(("own", "names", "pointer", "says"), [
    ({"presets": ["gpt-5"]}, [], "/presets/0", "llama-3.1-8b"),
    ({}, ["gpt-5"], "--preset", "llama-3.1-8b"),
    ({"presets": "x"}, [], "/presets", "list of names"),
    ({"presets": ["h100"] * 9}, [], "/presets", "found 9 names; must be at most 8"),
    (3, [], "", "must be a JSON object"),
    (None, [], "", "must be a JSON object"),
])  # fmt: skip
def test_presets_that_cannot_be_read_are_named(own: Any, names: list[str], pointer: str, says: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        with_presets(own, names, {})
    (issue,) = raised.value.issues
    assert issue.pointer == pointer
    assert says in issue.detail


def test_every_key_and_type_is_documented() -> None:
    text = (ROOT / "docs/estimates.md").read_text(encoding="utf-8")
    for section in (Transformer, ParallelConfig, Device):
        assert [key for key in section.model_fields if f"| `{key}` |" not in text] == []
    for names in (TEXT_KINDS, WRAPPERS):
        assert f"| {', '.join(sorted(names))} |" in text


# Files of transformers; sizes that a file leaves out are those of its type.
LLAMA: Document = {"model_type": "llama"}
HYBRID: Document = {"model_type": "nemotron_h"}
SUPER = {
    **HYBRID, "num_key_value_heads": 2, "n_routed_experts": 512, "num_experts_per_tok": 22,
    "moe_intermediate_size": 2688, "moe_shared_expert_intermediate_size": 5376, "moe_latent_size": 1024,
    "hybrid_override_pattern": "MEMEMEM*EMEMEMEM*EMEMEMEM*" + 4 * "EMEMEMEMEM*" + "EMEMEMEM*EMEMEMEME",
}  # fmt: skip
KIMI_VL = {
    "model_type": "kimi_vl", "vocab_size": 163840, "vision_config": {"model_type": "moonvit"},
    "text_config": {
        "vocab_size": 163840, "hidden_size": 2048, "intermediate_size": 11264, "moe_intermediate_size": 1408,
        "num_hidden_layers": 27, "num_attention_heads": 16, "n_shared_experts": 2, "n_routed_experts": 64,
        "num_experts_per_tok": 6, "n_group": 1, "first_k_dense_replace": 1, "q_lora_rank": None,
    },
}  # fmt: skip
QWEN2_5_VL: Document = {
    "model_type": "qwen2_5_vl", "hidden_size": 3584,
    "vision_config": {"hidden_size": 1280, "intermediate_size": 3420, "image_size": 448},
}  # fmt: skip


def read(document: Document) -> Transformer:
    return validated(Transformer, {"sequence": 1024, **from_transformers(document)})


@pytest.mark.parametrize(("document", "total", "active"), [(SUPER, 120e9, 12e9), (KIMI_VL, 16.4e9, None)])
def test_a_file_has_the_published_parameters(document: Document, total: float, active: float | None) -> None:
    """Other types are compared with transformers, which counts neither these nor active parameters."""
    count = parameters_of(read(document), with_predictions=False)
    assert count.total == pytest.approx(total, rel=0.015)
    assert active is None or count.active == pytest.approx(active, rel=0.13)


def test_the_encoder_of_kimi_vl_has_the_published_parameters() -> None:
    """Kimi Team 2025, Kimi-VL, §2.1: MoonViT has 400 M; counted, 415 M. Merged patches are projected."""
    whole, text = (parameters_of(read(file)).total for file in (KIMI_VL, {**KIMI_VL, "vision_config": None}))
    assert whole - text == pytest.approx(415e6 + 4608**2 + 4608 * 2048, rel=0.005)


TWELVE = {"num_hidden_layers": 12}
DSA = {"model_type": "glm_moe_dsa", **TWELVE, "index_topk_freq": 4, "index_skip_topk_offset": 3}
EXAONE = {"model_type": "exaone4", "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 3,
          **TWELVE, "sliding_window": 64}  # fmt: skip


@pytest.mark.parametrize(("document", "kinds"), [
    ({"model_type": "gemma3_text", **TWELVE}, "W-W-W-W-W-*-" * 2),
    ({"model_type": "qwen3_5_text", **TWELVE}, "M-M-M-*-" * 3),
    ({"model_type": "qwen3_next", **TWELVE}, "MEMEME*E" * 3),
    ({"model_type": "llama4_text", **TWELVE}, "WEWEWE*E" * 3),
    ({"model_type": "deepseek_v32", **TWELVE}, "I-I-I-" + "IE" * 9),
    ({"model_type": "mixtral", **TWELVE}, "*E" * 12),
    ({"model_type": "deepseek_v3", **TWELVE, "first_k_dense_replace": 12}, "*-" * 12),
    ({"model_type": "deepseek_v3", **TWELVE, "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 9},
     "*-" * 3 + "*E" * 9),
    (DSA, "I-I-I-WEWEWEIEWEWEWEIEWE"),
    ({"model_type": "qwen2", **TWELVE, "use_sliding_window": True, "sliding_window": 64,
      "max_window_layers": 2}, "*-*-" + "W-" * 10),
    ({"model_type": "cohere2", **TWELVE, "sliding_window": 4096, "layer_switch": 2}, "W-*-" * 6),
    *(({**EXAONE, "sliding_window_pattern": every}, "W-W-W-*-" * 3) for every in ("LLLG", 4, None)),
    ({**HYBRID, "layers_block_type": ["mamba", "moe", "attention"]}, "ME*"),
    ({**HYBRID, "layer_types": ["linear_attention", "moe", "mamba", "full_attention"]}, "MEM*"),
    ({**HYBRID, "hybrid_override_pattern": "M-M*" * 2}, "M-M*" * 2),
    ({**HYBRID, "layer_types": ["mamba", "attention"], "sliding_window": 64}, "MW"),
])  # fmt: skip
def test_the_layers_of_a_file_become_kinds_of_blocks(document: Document, kinds: str) -> None:
    model = read(document)
    assert "".join(model.kinds) == kinds
    assert (expert_degree(model) > 1) == ("E" in kinds)


GEMMA = {"model_type": "gemma2", **TWELVE, "sliding_window": None, "sliding_window_size": 1024}
MTP = {**HYBRID, "layer_types": ["mamba", "moe"], "mtp_layers_block_type": ["attention", "moe"],
       "num_nextn_predict_layers": 1}  # fmt: skip
SEEN = QWEN2_5_VL["vision_config"]


@pytest.mark.parametrize(("document", "section"), [
    ({"model_type": "deepseek_v3", "num_nextn_predict_layers": 1},
     {"prediction_layers": 1, "expert_nodes": 4, "dense_layers": 3, "shared_expert_ffn": 2048}),
    *(({"model_type": "deepseek_v3", "n_group": groups}, {"expert_nodes": nodes})
      for groups, nodes in ((1, None), (2, 4))),
    ({**LLAMA, "model_type": "mistral", "sliding_window": 4096}, {"window": 4096}),
    ({**LLAMA, "sliding_window": None, "dtype": "float16"}, {"window": None, "dtype": "float16"}),
    ({"model_type": "gpt_oss"}, {"window": 128, "full_attention_every": 2}),
    # Names that published files have: gemma-2-9b repeats its window, Nemotron-H its groups of queries.
    (GEMMA, {"window": 1024}),
    ({**GEMMA, "layer_types": ["sliding_attention", "full_attention"] * 6}, {"window": 1024}),
    ({"model_type": "nemotron_h", "layer_types": ["mamba", "attention"], "num_query_groups": 4},
     {"kv_heads": 4}),
    # A class of mixtures makes a dense model of a file without experts.
    ({"model_type": "dots1", "n_shared_experts": 2, "num_experts_per_tok": 6, "n_group": 8},
     {"experts": None, "layers": 62, "shared_expert_ffn": None}),
    # Dropout counts outside attention.
    ({"model_type": "gpt2"}, {"dropout": True}),
    ({"model_type": "gpt2", "resid_pdrop": 0, "embd_pdrop": 0}, {"dropout": False}),
    ({**LLAMA, "attention_dropout": 0.1}, {"dropout": False}),
    (MTP, {"prediction_layers": 1, "prediction_pattern": "(*E)", "pattern": "ME"}),
    (QWEN2_5_VL, {"vision": {
        "hidden": 1280, "layers": 32, "heads": 16, "ffn": 3420, "patches": 32**2, "merged": 4,
        "patch_values": 3 * 14**2 * 2, "pooled": False, "projector": [4 * 1280], "projectors": 1,
        "window": 64, "full_attention": [7, 15, 23, 31], "norm": "rmsnorm", "gated": True,
        "positions": "rotary"}}),
    ({**QWEN2_5_VL, "vision_config": None}, {"vision": None}),
])  # fmt: skip
def test_a_file_gives_the_values_of_the_section_model(document: Document, section: Document) -> None:
    found = from_transformers(document)
    assert {key: found.get(key) for key in section} == section


FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
NVFP4 = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}}


@pytest.mark.parametrize(("document", "name"), [
    ({**LLAMA, **FP8}, "fp8"),
    ({**LLAMA, **NVFP4}, "NVFP4"),
    ({**LLAMA, "quantization_config": [4]}, "another type"),
    ({**QWEN2_5_VL, **NVFP4}, "NVFP4"),
    ({"model_type": "llava", "text_config": {**LLAMA, **FP8}}, "fp8"),
])  # fmt: skip
def test_the_answer_says_that_quantized_weights_have_no_effect(document: Document, name: str) -> None:
    text = document.get("text_config", document)
    plain = {**document, "text_config": {**text, "quantization_config": None}, "quantization_config": None}
    if "text_config" not in document:
        del plain["text_config"]
    found, without = from_transformers(document), from_transformers(plain)
    model = Transformer.model_validate({"sequence": 8, **found})
    assert model.origin is not None
    assert f"weights in {name}, which has no effect" in model.origin.text
    assert "origin" not in without
    assert {key: value for key, value in found.items() if key != "origin"} == without


TWO = {"num_hidden_layers": 2}
DEEP2, QWEN_NEXT = {"model_type": "deepseek_v3", **TWO}, {"model_type": "qwen3_next", **TWO}
REFUSED = ("falcon_h1", "gemma3n_text", "qwen4_exp", "rwkv", "zamba2")
SENT = "save the section {} as a file"
UNREADABLE: list[Any] = [
    {"model_type": "gemma3n_text"}, {**LLAMA, "wormholes": 3}, {"hidden_size": 1}, [], None
]  # fmt: skip
WRONG: list[tuple[Document, str, str]] = [
    ({"model_type": "t5"}, "/model_type", "types, which docs/estimates.md lists. Write its sizes as"),
    ({"model_type": "deepseek_v5"}, "/model_type", "lists. Did you mean deepseek_v"),
    ({"model_type": ["llama"]}, "/model_type", "found ['llama']"),
    *(({**LLAMA, "model_type": name}, "/model_type", "Write its sizes as model.json") for name in REFUSED),
    # The language model of an unknown wrapper can be planned alone, if zbv reads it.
    *(({"model_type": "ovis2", key: LLAMA}, "/model_type", SENT.format(key))
      for key in ("text_config", "llm_config")),
    *(({"model_type": "ovis2", "text_config": text}, "/model_type", " Write its sizes as model.json")
      for text in UNREADABLE),
    ({"model_type": "llava"}, "/text_config", "must be an object"),
    # Values of a wrong kind (any may be, see the comparison with transformers), and lists of other lengths.
    ({**LLAMA, "hidden_size": "x"}, "/hidden_size", "must be a whole number above 0"),
    ({**DEEP2, "n_group": "8"}, "/n_group", "must be a whole number from 0"),
    ({**QWEN_NEXT, "mlp_only_layers": 5}, "/mlp_only_layers", "must be a list"),
    ({**QWEN_NEXT, "mlp_only_layers": [2]}, "/mlp_only_layers", "numbers of layers, which are below 2"),
    ({**LLAMA, "layer_types": ["full_attention"] * 3}, "/layer_types", "one per layer (32)"),
    ({**HYBRID, "layer_types": ["mamba"], **TWO}, "/num_hidden_layers", "found 2; there are 1 layers"),
    # Values of lists that zbv does not know.
    *(({**file, key: [known, other]}, f"/{key}", f"found {other!r}; zbv has formulas for {formulas}")
      for file, key, known, other, formulas in (
          ({**LLAMA, **TWO}, "layer_types", "full_attention", "lightning", "attention, full_attention"),
          (HYBRID, "layer_types", "mamba", 3, "-, mlp, E"),
          (MTP, "mtp_layers_block_type", "moe", "x", ""),
          (DEEP2, "mlp_layer_types", "dense", "mixed", "sparse, dense"),
          ({**DEEP2, "index_topk": 8}, "indexer_types", "full", "part", "full, F, shared, S"))),
    # Numbers that contradict a list.
    *(({**file, key: value, "num_hidden_layers": 2, listed: values}, f"/{key}",
       f"found {value!r}, but {listed} says otherwise")
      for file, key, value, listed, values in (
          (DEEP2, "first_k_dense_replace", 0, "mlp_layer_types", ["dense", "sparse"]),
          ({**DEEP2, "first_k_dense_replace": 1}, "moe_layer_freq", [1, 1], "mlp_layer_types",
           ["dense", "sparse"]),
          (QWEN_NEXT, "full_attention_interval", 4, "layer_types", ["linear_attention", "full_attention"]),
          ({"model_type": "exaone4"}, "sliding_window_pattern", "LLLG", "layer_types",
           ["sliding_attention", "full_attention"]),
          ({"model_type": "llama4_text"}, "interleave_moe_layer_step", 2, "moe_layers", [0]),
          ({"model_type": "glm_moe_dsa", "index_skip_topk_offset": 1}, "index_topk_freq", 2, "indexer_types",
           ["full", "full"]))),
    ({**DEEP2, "qk_head_dim": 256}, "/qk_head_dim", "must be qk_nope_head_dim + qk_rope_head_dim (192)"),
    ({**LLAMA, "num_experts": 8, "n_routed_experts": 16}, "/num_experts", "but n_routed_experts says 16"),
    ({"model_type": "llava", "text_config": LLAMA, "vocab_size": 1}, "/vocab_size",
     "found 1, but the language model has 32000"),
    # What zbv has no formula for, or does not know.
    ({"model_type": "qwen3_5_text", "mtp_num_hidden_layers": 2}, "/mtp_num_hidden_layers", "its projection"),
    ({"model_type": "minimax_m2", **TWO, "attn_type_list": [0, 1]}, "/attn_type_list",
     "found 0; zbv has formulas for 1."),
    ({"model_type": "minimax_m2", "mtp_transformer_layers": 2}, "/mtp_transformer_layers", "one layer only"),
    ({**KIMI_VL, "vision_config": {"model_type": "dinov2"}}, "/vision_config/model_type",
     "remove vision_config"),
    ({**LLAMA, "sliding_window": 4096}, "/sliding_window", "does not know what this key changes"),
    ({**LLAMA, "add_cross_attention": True}, "/add_cross_attention", "formulas for false or null only"),
    ({**QWEN2_5_VL, "vision_config": {**SEEN, "image_size": None}}, "/vision_config/image_size",
     "Add how many pixels a side of an image has, or remove vision_config"),
    ({**QWEN2_5_VL, "vision_config": {**SEEN, "out_hidden_size": 2048}}, "/vision_config/out_hidden_size",
     "found 2048; must be the width of the language model (3584)"),
]  # fmt: skip


@pytest.mark.parametrize(("document", "pointer", "says"), WRONG)
def test_what_cannot_be_read_is_named(document: Document, pointer: str, says: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        from_transformers(document)
    (issue,) = raised.value.issues
    assert issue.pointer == pointer
    assert says in issue.detail
