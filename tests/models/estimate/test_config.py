"""Reading configurations: pointers to broken rules, presets, and defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import zbv_models.estimate.sections
from support.paths import ROOT
from zbv_models.estimate.config import (
    ParallelConfig,
    Precision,
    parse_config,
    problem_document,
)
from zbv_models.estimate.device import Device
from zbv_models.estimate.model import Transformer
from zbv_models.estimate.sections import preset, preset_names, with_presets
from zbv_solver.errors import InvalidInput
from zbv_solver.problem.reading import parse_any_problem

MODEL = {"hidden": 512, "layers": 4, "heads": 8, "vocabulary": 1000, "sequence": 128}
SEEING = {"hidden": 8, "layers": 2, "heads": 2, "patches": 4}
"""Keys without a flag."""
PARALLEL = {"pp_degree": 2, "microbatches": 4}
DEVICE = {"achieved_tflops": 100}


def document(**sections: dict[str, Any]) -> dict[str, Any]:
    given = {"model": MODEL, "parallel": PARALLEL, "device": DEVICE}
    return {name: {**section, **sections.get(name, {})} for name, section in given.items()}


def issues(found: Any) -> dict[str, str]:
    with pytest.raises(InvalidInput) as raised:
        parse_config(found)
    return {issue.pointer: issue.detail for issue in raised.value.issues}


def test_the_defaults_are_a_gpt_in_mixed_precision() -> None:
    config = parse_config(document())
    model = config.model
    assert (model.n_kv_heads, model.width_of_head, model.ffn_width) == (8, 64, 2048)
    assert model.has_qkv_bias
    assert config.precision == Precision(parameters=2, gradients=4, master=4, state=4)
    assert config.state.updated() == 4 + 2 * 4
    assert config.placement == "auto"


def test_precision_and_placement_follow_from_the_model() -> None:
    single = parse_config(document(model={"dtype": "float32", "tied_embeddings": True}))
    assert single.precision == Precision(parameters=4, gradients=4, master=0, state=4)
    assert single.placement == "v"
    assert parse_config(document(parallel={"placement": "loop"})).placement == "loop"


def test_bytes_per_parameter_can_be_given() -> None:
    sizes = {"parameters": 1, "gradients": 2, "master": 4, "state": 1.5}
    assert parse_config(document(parallel={"precision": sizes})).precision == Precision(**sizes)


@pytest.mark.parametrize(
    ("changes", "pointer", "says"),
    [
        ({"model": {"hidden": 0}}, "/model/hidden", "found 0; input should be greater than or equal to 1"),
        ({"model": {"hidden": 512.0}}, "/model/hidden", "found 512.0; input should be a valid integer"),
        ({"model": {"hiden": 1}}, "/model/hiden", "unknown key"),
        ({"model": {"dtype": "int8"}}, "/model/dtype", "'bfloat16', 'float16' or 'float32'"),
        ({"model": {"gated": 1}}, "/model/gated", "valid boolean"),
        ({"model": {"layers": 511}}, "/model/layers", "found 511; must be at most 510."),
        (
            {"model": {"layers": 256}, "parallel": {"granularity": "half"}},
            "/model/layers",
            "found 256; must be at most 255. Use granularity block.",
        ),
        ({"model": {"heads": 7}}, "/model/heads", "must divide hidden (512). Or give head_dim"),
        ({"model": {"kv_heads": 3}}, "/model/kv_heads", "found 3; must divide heads (8)"),
        ({"parallel": {"zero_stage": 4}}, "/parallel/zero_stage", "less than or equal to 3"),
        ({"parallel": {"precision": "fp8"}}, "/parallel/precision", "'mixed-fp32-gradients'"),
        ({"parallel": {"precision": {}}}, "/parallel/precision/master", "required and absent"),
        ({"parallel": {"recompute": "selective"}}, "/parallel/recompute", "flash keeps none. Use full"),
        ({"device": {"achieved_tflops": 0}}, "/device/achieved_tflops", "greater than 0"),
        ({"device": {"achieved_tflops": float("nan")}}, "/device/achieved_tflops", "finite"),
        ({"device": {"tensor_parallel_overlap": 1.5}}, "/device/tensor_parallel_overlap", "equal to 1"),
    ],
)
def test_a_broken_rule_is_reported_at_its_key(changes: dict[str, Any], pointer: str, says: str) -> None:
    found = issues(document(**changes))
    assert says in found[pointer]


LATENT = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
SPARSE = {"experts": 8, "experts_per_token": 2}
GIVEN = {"parameters": 1, "flops": 1.0}


@pytest.mark.parametrize(
    ("model", "parallel", "pointer", "says"),
    [
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
        ({"state_space": GIVEN}, {}, "/model/state_space", "Give pattern"),
        ({"state_space": {}}, {}, "/model/state_space/flops", "required and absent"),
        ({"vision": {"hidden": 9, "layers": 1, "heads": 2, "patches": 4}}, {}, "/model/vision/heads", "(9)"),
        ({"vision": {**SEEING, "full_attention": [0]}}, {}, "/model/vision/full_attention", "Give window"),
        (
            {"vision": {**SEEING, "window": 2, "full_attention": [2]}},
            {},
            "/model/vision/full_attention",
            "found 2; must be below the encoder's layers (2)",
        ),
        (
            {"vision": {**SEEING, "projector": [], "projector_gated": True}},
            {},
            "/model/vision/projector_gated",
            "a projector of one matrix has no gate",
        ),
        ({"product_dtype": "fp8"}, {}, "/device/fp8_tflops", "product_dtype fp8 needs it"),
        ({}, {"context_parallel": 3}, "/parallel/context_parallel", "so 6 must divide sequence (128)"),
        ({}, {"context_parallel": 16, "tensor_parallel": 8, "sequence_parallel": True},
         "/parallel/context_parallel", "so 256 must divide sequence (128)"),
        ({"attention": "plain"}, {"context_parallel": 2}, "/parallel/context_parallel", "Use flash"),
        ({}, {"context_parallel": 2}, "/device/context_parallel_bandwidth", "needs it, or link_bandwidth"),
        ({}, {"expert_parallel": 2}, "/parallel/expert_parallel", "the model has no experts"),
        (SPARSE, {"expert_parallel": 3, "data_parallel": 3}, "/parallel/expert_parallel", "experts (8)"),
        (SPARSE, {"expert_parallel": 4}, "/parallel/expert_parallel", "devices of a rank"),
        (
            SPARSE,
            {"expert_parallel": 4, "data_parallel": 4, "expert_parallel_in_node": 3},
            "/parallel/expert_parallel_in_node",
            "must divide expert_parallel (4)",
        ),
        (SPARSE, {"tensor_parallel": 2}, "/parallel/sequence_parallel", "needs sequence parallelism"),
        ({"prediction_layers": 600}, {}, "/model/layers", "must be at most"),
        ({"prediction_layers": 10**8}, {}, "/model/layers", "100000000 as prediction_layers; together"),
    ],
)  # fmt: skip
def test_rules_of_modern_models(
    model: dict[str, Any], parallel: dict[str, Any], pointer: str, says: str
) -> None:
    assert says in issues(document(model=model, parallel=parallel))[pointer]


def test_all_broken_rules_are_reported_at_once() -> None:
    found = issues(document(model={"heads": 12, "kv_heads": 5}, parallel={"tensor_parallel": 7}))
    assert set(found) == {
        "/model/heads",
        "/model/kv_heads",
        "/parallel/tensor_parallel",
        "/device/tensor_parallel_bandwidth",
    }
    missing = issues({"model": {}, "device": {"memory_limit": -1}})
    assert {"/model/hidden", "/parallel", "/device/achieved_tflops", "/device/memory_limit"} <= set(missing)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("heads", {"heads": 9, "hidden": 576, "kv_heads": 3}),
        ("kv_heads", {"kv_heads": 1}),
        ("ffn", {"ffn": 1001}),
        ("vocabulary", {"vocabulary": 50257}),
        ("sequence", {"sequence": 127}),
        (
            "the heads of vision",
            {"vision": {"hidden": 66, "layers": 2, "heads": 6, "ffn": 64, "patches": 16}},
        ),
        ("the ffn of vision", {"vision": {"hidden": 64, "layers": 2, "heads": 4, "ffn": 66, "patches": 16}}),
    ],
)
def test_tensor_parallelism_must_divide_every_shared_size(name: str, model: dict[str, Any]) -> None:
    parallel = {"tensor_parallel": 4, "sequence_parallel": True}
    given = document(model=model, parallel=parallel, device={"tensor_parallel_bandwidth": 100})
    with pytest.raises(InvalidInput) as raised:
        parse_config(given)
    details = [issue.detail for issue in raised.value.issues]
    assert any(f"must divide {name}" in detail for detail in details)
    if name == "vocabulary":
        assert "Pad it to 50260." in details[0]


@pytest.mark.parametrize("found", [3, [], "x", None])
def test_a_document_that_is_not_an_object_is_refused(found: Any) -> None:
    with pytest.raises(InvalidInput, match="must be a JSON object"):
        with_presets(found, [], {})


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_names_its_source_and_is_valid(name: str) -> None:
    found = preset(name)
    assert found.about
    assert found.source
    if found.model:
        config = parse_config(with_presets({}, [name], {}))
        parse_any_problem(problem_document(config))
    else:
        assert parse_config(with_presets(document(), [], {"device": found.device})).device.memory_limit


@pytest.mark.parametrize(
    "name", [each for each in preset_names() if "achieved_tflops" in preset(each).device]
)
def test_no_device_reaches_the_rate_of_its_data_sheet(name: str) -> None:
    device = preset(name).device
    assert device["achieved_tflops"] < device["peak_tflops"]


def test_presets_are_files_of_the_package() -> None:
    """A wheel contains all files in a package's folder."""
    folder = Path(zbv_models.estimate.sections.__file__).parent / "presets"
    assert {f"{name}.json" for name in preset_names()} == {path.name for path in folder.iterdir()}


def test_the_user_s_keys_replace_the_preset_s_and_flags_replace_both() -> None:
    own = {"presets": ["llama-3.1-8b"], "model": {"sequence": 4096, "layers": 16}}
    config = parse_config(with_presets(own, ["a100-80gb"], {"model": {"layers": 8}}))
    assert (config.model.hidden, config.model.sequence, config.model.layers) == (4096, 4096, 8)
    assert config.device.achieved_tflops == preset("a100-80gb").device["achieved_tflops"]


@pytest.mark.parametrize(
    ("own", "names", "pointer"),
    [
        ({"presets": ["gpt-5"]}, [], "/presets/0"),
        ({}, ["gpt-5"], "--preset"),
        ({"presets": "x"}, [], "/presets"),
    ],
)
def test_an_unknown_preset_is_named(own: dict[str, Any], names: list[str], pointer: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        with_presets(own, names, {})
    (issue,) = raised.value.issues
    assert issue.pointer == pointer
    assert "llama-3.1-8b" in issue.detail or "list of names" in issue.detail


def test_every_key_is_documented() -> None:
    text = (ROOT / "docs/estimates.md").read_text(encoding="utf-8")
    for section in (Transformer, ParallelConfig, Device):
        assert [key for key in section.model_fields if f"| `{key}` |" not in text] == []
