"""Module trees of transformers against zbv's formulas, where it has some, and as the way to other types."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from models.estimate.test_transformers import as_file, built, counted_by_transformers, made
from support.estimates import but
from zbv_models.estimate.model import Transformer
from zbv_models.estimate.model_layers import layer_kinds, parameters_of, shapes_of
from zbv_models.estimate.model_rules import fits, model_issues
from zbv_models.estimate.part import Part
from zbv_models.estimate.shapes import NONE, Degrees
from zbv_models.estimate.transformers_config import from_transformers, is_transformers_config, read_config
from zbv_solver.commands.cli import main
from zbv_solver.errors import InvalidInput

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from zbv_models.estimate.module_counts import Counting  # noqa: E402  # it imports torch
from zbv_models.estimate.module_tree import model_of  # noqa: E402  # it imports torch

SEQUENCE = 512
SIZES: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 64, "vocab_size": 4096, "num_hidden_layers": 4, "tie_word_embeddings": False,
}  # fmt: skip
KNOWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"sliding_window": 128},
    "qwen3_moe": {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 192},
    "deepseek_v3": {
        "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 192, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 192, "kv_lora_rank": 128,
        "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "num_key_value_heads": 8,
    },
    "bamba": {"mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 64, "attn_layer_indices": [2]},
}  # fmt: skip
MORE = {"deepseek_v3": 0.12, "bamba": 0.03}
"""Relative differences of bytes: copies of rotated keys, and stand-ins for scans without their norms."""
UNKNOWN: dict[str, dict[str, Any]] = {
    "falcon_h1": {"mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_ssm": 1024, "mamba_d_state": 64},
    "gemma3n_text": {
        "intermediate_size": 1024, "vocab_size_per_layer_input": 4096, "hidden_size_per_layer_input": 32,
        "laurel_rank": 16, "num_kv_shared_layers": 0, "activation_sparsity_pattern": None,
    },
    "cohere2_moe": {"num_experts": 16, "num_experts_per_tok": 4},
    "diffllama": {},
    "mamba2": {"num_heads": 8, "head_dim": 128, "state_size": 64, "num_hidden_layers": 2},
}  # fmt: skip

FALCON, DIFF = (as_file(made(name, **{**SIZES, **UNKNOWN[name]})) for name in ("falcon_h1", "diffllama"))


def parts(model: Transformer) -> list[tuple[int, Part]]:
    return [
        (kind.count, half.part(shapes_of(model, kind, Degrees())))
        for kind in layer_kinds(model)
        for _, half in kind.halves
    ]


@pytest.mark.parametrize("name", KNOWN)
def test_a_tree_has_the_parameters_operations_and_tensors_of_our_formulas(name: str) -> None:
    """Operations within 1 %, and bytes within 0.5 %; of some types, transformers keeps more."""
    document = as_file(made(name, **{**SIZES, **KNOWN[name]}))
    tree = Transformer.model_validate(model_of(document, SEQUENCE))
    read = {**from_transformers(document), "sequence": SEQUENCE, "fused_activation": False}
    ours = Transformer.model_validate({**read, "prediction_layers": 0})
    assert parameters_of(tree).total == counted_by_transformers(made(name, **{**SIZES, **KNOWN[name]}))
    assert parameters_of(tree).active == pytest.approx(parameters_of(ours).active, rel=1e-4)

    def sums(model: Transformer) -> list[float]:
        flops = sum((part.flops.scaled(count) for count, part in parts(model)), NONE)
        kept = [
            sum(count * getattr(part, key) for count, part in parts(model))
            for key in ("after_forward", "after_input")
        ]
        return [flops.forward, flops.backward_input, flops.backward_weight, *kept]

    for place, (found, expected) in enumerate(zip(sums(tree), sums(ours), strict=True)):
        assert found == pytest.approx(expected, rel=0.01 if place < 3 else MORE.get(name, 0.005))


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_type_that_zbv_does_not_know_has_the_parameters_that_transformers_counts(name: str) -> None:
    config = made(name, **{**SIZES, **UNKNOWN[name]})
    with pytest.raises(InvalidInput, match=name):
        from_transformers(as_file(config))
    model = Transformer.model_validate(read_config(as_file(config), SEQUENCE))
    assert parameters_of(model).total == counted_by_transformers(config)
    assert list(model_issues(model)) == []
    assert model.origin is not None
    assert name in model.origin.text
    assert fits(model, Degrees(tensor=4, sequence_parallel=True))
    assert not fits(model, Degrees(tensor=16, sequence_parallel=True))  # of 8 heads
    if name == "cohere2_moe":
        assert (model.experts, model.experts_per_token) == (16, 4)
        assert fits(model, Degrees(expert=8, data=8))


def test_equal_blocks_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of twice as many blocks has the same variants."""
    runs, run_block = [], Counting.run

    def run(*args: Any) -> Any:
        runs.append(args)
        return run_block(*args)

    monkeypatch.setattr(Counting, "run", run)
    sizes = [{**SIZES, **UNKNOWN["falcon_h1"], "num_hidden_layers": count} for count in (2, 4)]
    few, many = (model_of(as_file(made("falcon_h1", **each)), 64) for each in sizes)
    assert few["variants"] == many["variants"]
    assert many["pattern"] == 2 * few["pattern"]
    assert len(runs) == 2


def test_longer_sequences_have_more_work_of_attention_per_token() -> None:
    document = FALCON
    short, long = (model_of(document, length)["variants"][0]["state_space"] for length in (256, 512))
    assert short["flops"] == long["flops"]
    attention = 2 * 2 * 8 * 64 * 256 / 2  # scores and outputs of 8 heads of 64, half of them under the mask
    assert long["core_flops"] - short["core_flops"] == pytest.approx(attention)


def run(tmp_path: Path, document: Any, *flags: str, command: str = "estimate") -> int:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    if command == "layout":
        return main(["layout", str(path), *flags])
    return main(["estimate", "--config", str(path), "--preset", "h100", *flags])


PIPELINE = ("--sequence-length", "256", "--pp-degree", "2", "--microbatches", "4", "-o")


def test_the_commands_plan_such_a_model_and_say_where_it_comes_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = FALCON
    problem = tmp_path / "problem.json"
    assert run(tmp_path, document, *PIPELINE, str(problem), "--table") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "FalconH1ForCausalLM" in shown
    assert "module tree" in shown
    assert len(json.loads(problem.read_text())["layers"]) == 3  # embedding, equal blocks, head
    cluster = tmp_path / "cluster.json"
    cluster.write_text(json.dumps({"nodes": 1, "gpus_per_node": 4, "device": "h100"}))
    answer = tmp_path / "answer.json"
    flags = ("--cluster", str(cluster), "--global-batch", "8", "--sequence-length", "256", "-o", str(answer))
    assert run(tmp_path, document, *flags, command="layout") == 0
    assert "module tree" in " ".join(capsys.readouterr().out.split())
    assert "FalconH1ForCausalLM" in json.loads(answer.read_text())["origin"]


def test_of_other_wrappers_the_language_model_alone_is_read() -> None:
    text = as_file(made("llama", **SIZES))
    document = {"model_type": "internvl", "vision_config": {"hidden_size": 64}, "text_config": text}
    read = read_config(document, SEQUENCE)
    assert read["origin"].pop("text_alone") is True
    alone = {key: value for key, value in read.items() if key != "origin"}
    assert alone == from_transformers(text)
    text = DIFF
    read = read_config({**document, "text_config": text}, SEQUENCE)
    assert read["origin"]["text_alone"] is True
    assert read["origin"]["measured"]
    with pytest.raises(InvalidInput) as refused:
        read_config({**document, "text_config": {**text, "model_type": "wormhole"}}, SEQUENCE)
    assert [issue.pointer for issue in refused.value.issues] == ["/text_config/model_type"]


def test_a_language_model_without_a_head_has_that_of_its_file() -> None:
    """Types of wrappers alone: transformers has no class with a head for them."""
    sizes = {
        **SIZES,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]},
    }
    text = {**as_file(made("qwen2_5_omni_text", **sizes)), "tie_word_embeddings": True}
    wrapped = {"model_type": "qwen2_5_omni", "thinker_config": {"model_type": "x", "text_config": text}}
    tied = Transformer.model_validate(read_config(wrapped, SEQUENCE))
    untied = Transformer.model_validate(read_config({**text, "tie_word_embeddings": False}, SEQUENCE))
    table = SIZES["vocab_size"] * SIZES["hidden_size"]
    assert parameters_of(untied).total - parameters_of(tied).total == table
    llama = as_file(made("qwen2", **SIZES))  # the same blocks, with the head
    assert parameters_of(untied).total == parameters_of(built(llama)).total


@pytest.mark.parametrize(("document", "words"), [
    ({"model_type": "wormhole"}, ("wormhole", "transformers does not know", "model.json")),
    ({"model_type": "whisper"}, ("whisper", "encoder and a decoder")),
    ({"model_type": "falcon_h1", "num_hidden_layers": "many"}, ("transformers rejects", "num_hidden_layers")),
    ({"model_type": "falcon_h1", "hidden_size": "64"}, ("hidden_size", "expected int")),
    ({"model_type": "falcon_h1", "num_hidden_layers": 10_000}, ("/num_hidden_layers", "at most 512")),
    ({"model_type": "bert", "is_decoder": True, "max_position_embeddings": 64}, ("/model/sequence", "64")),
    ({"model_type": "vit"}, ("vit", "no language model", "zbv-worker profile")),
    ({"model_type": "wav2vec2"}, ("wav2vec2", "no language model", "zbv-worker profile")),
    ({"model_type": "cohere_compass_text"}, ("cannot build", "full_attention", "published one")),
])  # fmt: skip
def test_what_cannot_be_read_is_refused_with_its_reason(document: Any, words: tuple[str, ...]) -> None:
    assert is_transformers_config(document)
    with pytest.raises(InvalidInput) as refused:
        read_config(document, SEQUENCE)
    for word in words:
        assert word in str(refused.value)


def test_a_loop_over_tokens_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 100, "context_length": 1024}
    monkeypatch.setattr("zbv_models.estimate.module_counts.MOST_OPERATORS", 1_000)
    with pytest.raises(InvalidInput, match="more than 1000 operators, as of a loop over tokens"):
        read_config({"model_type": "rwkv", **sizes}, SEQUENCE)


def test_the_answer_says_where_attention_keeps_scores() -> None:
    """Types whose attention is transformers' own, and no function that training replaces."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 100}
    for name, keeps in (("falcon", True), ("persimmon", False)):
        model = Transformer.model_validate(read_config({"model_type": name, **sizes}, SEQUENCE))
        assert model.origin is not None
        assert ("matrices of scores" in model.origin.text) == keeps


def test_a_length_that_is_no_length_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = DIFF
    assert run(tmp_path, document, "--sequence-length", "0", "--pp-degree", "2", "--microbatches", "4") == 2
    assert "--sequence-length: found 0" in capsys.readouterr().err


def test_without_transformers_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("zbv_models.estimate.module_tree", raising=False)
    monkeypatch.delitem(sys.modules, "zbv_models.estimate.module_tree", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InvalidInput, match=r"falcon_h1.*pip install 'zbv\[transformers\]'"):
        read_config({"model_type": "falcon_h1"}, SEQUENCE)


def test_given_costs_have_the_operations_of_i_that_they_say() -> None:
    costs = {"parameters": 10, "flops": 100.0, "core_flops": 10.0}
    shape = {"hidden": 8, "layers": 1, "heads": 1, "pattern": "M", "vocabulary": 8, "sequence": 4}
    twice = Transformer.model_validate({**shape, "state_space": costs})
    given = Transformer.model_validate({**shape, "state_space": {**costs, "core_flops_back": 25.0}})
    (_, first), (_, second) = (parts(model)[1] for model in (twice, given))
    assert first.core.backward_input == 4 * 20.0
    assert second.core.backward_input == 4 * 25.0
    assert but(given, state_space=twice.state_space) == twice
