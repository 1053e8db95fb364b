"""Reading configurations: pointers to broken rules, presets, and defaults."""

from __future__ import annotations

from typing import Any

import pytest
from support.paths import ROOT
from zbv_models.estimate import times
from zbv_models.estimate.config import ParallelConfig, Precision, parse_config, problem_document
from zbv_models.estimate.device import Device
from zbv_models.estimate.model import Transformer
from zbv_models.estimate.sections import preset, preset_names, with_presets
from zbv_solver.errors import InvalidInput
from zbv_solver.problem.reading import parse_any_problem

SECTIONS: dict[str, dict[str, Any]] = {
    "model": {"hidden": 512, "layers": 4, "heads": 8, "vocabulary": 1000, "sequence": 128},
    "parallel": {"pp_degree": 2, "microbatches": 4},
    "device": {"achieved_tflops": 100},
}
SEEING = {"hidden": 64, "layers": 2, "heads": 4, "patches": 4}
SPARSE = {"experts": 8, "experts_per_token": 2}
SP = {"tensor_parallel": 4, "sequence_parallel": True}


def document(**sections: dict[str, Any]) -> dict[str, Any]:
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


@pytest.mark.parametrize(
    ("model", "parallel", "pointer", "says"),
    [
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
    ],
)  # fmt: skip
def test_a_broken_rule_is_reported_at_its_key(
    model: dict[str, Any], parallel: dict[str, Any], pointer: str, says: str
) -> None:
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
        attention = times.ULTRA_ATTENTION_SHARE if name in ("b300", "gb300") else times.ATTENTION_SHARE
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


@pytest.mark.parametrize(
    ("own", "names", "pointer", "says"),
    [
        ({"presets": ["gpt-5"]}, [], "/presets/0", "llama-3.1-8b"),
        ({}, ["gpt-5"], "--preset", "llama-3.1-8b"),
        ({"presets": "x"}, [], "/presets", "list of names"),
        ({"presets": ["h100"] * 9}, [], "/presets", "found 9 names; must be at most 8"),
        (3, [], "", "must be a JSON object"),
        ([], [], "", "must be a JSON object"),
        (None, [], "", "must be a JSON object"),
    ],
)
def test_presets_that_cannot_be_read_are_named(own: Any, names: list[str], pointer: str, says: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        with_presets(own, names, {})
    (issue,) = raised.value.issues
    assert issue.pointer == pointer
    assert says in issue.detail


def test_every_key_is_documented() -> None:
    text = (ROOT / "docs/estimates.md").read_text(encoding="utf-8")
    for section in (Transformer, ParallelConfig, Device):
        assert [key for key in section.model_fields if f"| `{key}` |" not in text] == []
