"""``zbv layout`` as users meet it: tables, documents, statuses and messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from zbv_solver.commands.cli import main

Capture = pytest.CaptureFixture[str]
MODEL = {
    "model": {"hidden": 512, "layers": 4, "heads": 8, "vocabulary": 1024, "sequence": 512},
    "global_batch": 8,
}
CLUSTER = {"nodes": 1, "gpus_per_node": 2, "device": "h100"}


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    for name, document in (("model", MODEL), ("cluster", CLUSTER)):
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    return [str(tmp_path / "model.json"), "--cluster", str(tmp_path / "cluster.json")]


def test_precision_and_optimizer_have_flags(files: list[str], tmp_path: Path, capsys: Capture) -> None:
    path, memory = tmp_path / "layouts.json", []
    for chosen in ([], ["--precision", "mixed"], ["--optimizer", "sgd"]):
        fixed = ["--data-parallel", "2", "--microbatch-size", "1", "--zero-stage", "0", "--recompute", "none"]
        assert main(["layout", *files, *fixed, *chosen, "-o", str(path)]) == 0
        memory.append(json.loads(path.read_text())["layouts"][0]["peak_memory"])
    assert memory[1] < memory[0]
    assert memory[2] < memory[0]
    assert main(["layout", *files, "--executor", "torchtitan", "--optimizer", "muon"]) == 2
    assert "torchtitan requires adam (found muon)" in " ".join(capsys.readouterr().err.split())


def test_modules_of_selective_recomputation_have_a_flag(files: list[str], capsys: Capture) -> None:
    """A ``config.json`` has no place for them."""
    given = ["--executor", "megatron", "--recompute", "selective", "--recompute-modules"]
    assert main(["layout", *files, "--pipeline-parallel", "2", *given, "core_attn"]) == 0
    assert "--recompute-modules core_attn" in capsys.readouterr().out
    assert main(["layout", *files, *given, "moe", "moe_act"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "--recompute-modules: found moe, moe_act; no layer of this model has them" in said


def test_layouts_are_listed_and_written(files: list[str], tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "layouts.json"
    assert main(["layout", *files, "--microbatch-size", "1", "--top", "3", "-o", str(path)]) == 0
    out = capsys.readouterr().out
    assert "pipeline parallel" in out
    assert "No layout has a step below" in " ".join(out.split())
    found = json.loads(path.read_text())
    steps = [each["step_time"] for each in found["layouts"]]
    assert steps == sorted(steps)
    assert len(steps) == 3
    assert found["considered"] >= found["pruned"] + 3
    best = found["layouts"][0]
    assert found["proof"]["no_layout_below"] <= best["lower_bound"] <= best["step_time"]
    (tmp_path / "plan.json").write_text(json.dumps(best["plan"]))
    (tmp_path / "problem.json").write_text(json.dumps(best["plan"]["problem"]))
    assert main(["check", str(tmp_path / "problem.json"), str(tmp_path / "plan.json")]) == 0


def test_parts_of_the_step_and_changes_are_printed(files: list[str], tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "layouts.json"
    asked = ["layout", *files, "--tensor-parallel", "1", "--sensitivity", "--points", "-o", str(path)]
    assert main(asked) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "the best step consists of" in out
    assert "backward weight" in out
    assert "memory x 0.9" in out
    assert "at most 4 pipelines are planned" in out
    found = json.loads(path.read_text())
    counts = [len(each["step_time"]) for each in found["points"].values()]
    assert sum(counts) == found["considered"]
    assert found["sensitivity"]["step_time"] == found["layouts"][0]["step_time"]


def test_a_full_search_of_the_best_is_not_worse(files: list[str], capsys: Capture) -> None:
    steps = []
    for effort in ([], ["--effort", "quick"]):
        assert main(["layout", *files, "--tensor-parallel", "1", "-o", "-", *effort]) == 0
        out, err = capsys.readouterr()
        assert "reserved by PyTorch" in err
        steps.append(json.loads(out)["layouts"][0]["step_time"])
    assert steps[1] <= steps[0]


@pytest.mark.parametrize("executor", ["zbv", "megatron"])
def test_a_time_limit_before_the_first_layout_is_named(
    executor: str, files: list[str], capsys: Capture
) -> None:
    assert main(["layout", *files, "--executor", executor, "--time-limit", "1e-9"]) == 2
    assert "--time-limit: found 1e-09 seconds" in capsys.readouterr().err


def test_a_time_limit_that_suffices_changes_nothing(files: list[str], capsys: Capture) -> None:
    assert main(["layout", *files, "--top", "1", "--time-limit", "600"]) == 0
    assert "The search ended" not in " ".join(capsys.readouterr().out.split())
    for wrong in ("0", "nan", "-1"):
        assert main(["layout", *files, f"--time-limit={wrong}"]) == 2
        assert "--time-limit: found" in capsys.readouterr().err


def test_mistakes_are_named(files: list[str], tmp_path: Path, capsys: Capture) -> None:
    def says(arguments: list[str], status: int = 2) -> str:
        assert main(["layout", *arguments]) == status
        return capsys.readouterr().err

    assert "--top: found 0" in says([*files, "--top", "0"])
    assert "--zero-stage: found 4; must be at most 3" in says([*files, "--zero-stage", "4"])
    assert "model, --preset: found neither" in says(files[1:])
    assert "--preset: found 'gpt-5'; not a preset" in says([*files[1:], "--preset", "gpt-5"])
    device = says([*files[1:], "--preset", "h100", "--global-batch", "8"])
    assert "--preset: found h100, a preset of a device. Name a preset of a model: one of" in device
    assert "llama-3.1-8b" in device
    assert "a100" not in device
    assert "--global-batch: this key is required" in says([*files[1:], "--preset", "llama-3.1-8b"])
    divided = says([*files, "--tensor-parallel", "3", "--zero-stage", "0"])
    assert "zbv: --tensor-parallel, --zero-stage: no layout divides 2 devices" in divided
    odd = says([*files, "--global-batch", "5", "--data-parallel", "2", "--top", "1"])
    assert "zbv: --data-parallel: no layout divides" in odd
    for effort in ([], ["--effort", "quick"]):
        assert "--workers: found 0; must be at least 1" in says([*files, "--workers", "0", *effort])
    (tmp_path / "cluster.json").write_text(json.dumps({**CLUSTER, "memory": 1e6}))
    assert "no layout fits" in says(files, 3)
    for wrong, message in (
        ([], "cluster.json: found []; must be a JSON object"),
        (None, "cluster.json: found null; must be a JSON object"),
        (
            {**CLUSTER, "device": 7},
            "cluster.json: /device: found 7; must be the name of a preset or a JSON object.",
        ),
        ({**CLUSTER, "memory": 0}, "cluster.json: /memory: found 0 bytes; must be above 0"),
    ):
        (tmp_path / "cluster.json").write_text(json.dumps(wrong))
        assert message in says(files)


def test_presets_in_the_model_are_named_in_the_file(
    files: list[str], tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "model.json").write_text(json.dumps({"presets": ["h100", "a100"], "global_batch": 8}))
    assert main(["layout", *files]) == 2
    assert "model.json: /presets: found h100, a100, presets of devices." in capsys.readouterr().err
    (tmp_path / "model.json").write_text(json.dumps({"global_batch": 8}))
    assert main(["layout", *files]) == 2
    assert "model.json: /model: this section is absent" in capsys.readouterr().err
    assert main(["layout", *files, "--preset", "gpt-5"]) == 2
    assert "zbv: --preset: found 'gpt-5'; not a preset" in capsys.readouterr().err


def test_multi_token_prediction_is_dropped_by_a_flag(tmp_path: Path, capsys: Capture) -> None:
    """A small DeepSeek-V3."""
    config = {
        "model_type": "deepseek_v3", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
        "intermediate_size": 512, "moe_intermediate_size": 128, "n_routed_experts": 8, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        "kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
        "v_head_dim": 32, "vocab_size": 1024, "num_nextn_predict_layers": 1,
    }  # fmt: skip
    for name, document in (("config", config), ("cluster", CLUSTER)):
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    files = [str(tmp_path / "config.json"), "--cluster", str(tmp_path / "cluster.json")]
    asked = ["layout", *files, "--global-batch", "8", "--sequence-length", "512",
             "--pipeline-parallel", "2", "-o", "-"]  # fmt: skip
    assert main(["layout", *files]) == 2
    said = capsys.readouterr().err
    assert "--global-batch: a config.json does not say it" in said
    assert "--sequence-length: a config.json does not say it" in said
    names = []
    for more in ([], ["--prediction-layers", "0"]):
        assert main([*asked, *more]) == 0
        found = json.loads(capsys.readouterr().out)["layouts"][0]["partition"]
        names.append({name.partition(".")[0] for stage in found for name in stage})
    assert names[0] - names[1] == {"prediction"}
    assert main([*asked, "--prediction-layers", "-1"]) == 2
    assert "--prediction-layers: found -1; input should be" in capsys.readouterr().err
