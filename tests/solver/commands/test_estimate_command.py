"""``zbv estimate`` as users meet it."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from zbv_solver.commands.cli import main
from zbv_solver.commands.messages import flag_of
from zbv_solver.commands.model_flags import SECTIONS, add_estimate_flags, flags

Capture = pytest.CaptureFixture[str]
CONFIG = {
    "model": {"hidden": 512, "layers": 4, "heads": 8, "vocabulary": 1000, "sequence": 128},
    "parallel": {"pp_degree": 2, "microbatches": 4},
    "device": {"achieved_tflops": 100, "link_latency": 5, "memory_limit": 1e9, "reserved": 1000},
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def test_a_configuration_becomes_layers(config: Path, capsys: Capture) -> None:
    assert main(["estimate", "--config", str(config)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    problem = json.loads(out)
    assert [layer["name"] for layer in problem["layers"]] == ["embedding", "block", "head"]
    assert problem["layers"][1]["repeat"] == 4
    assert problem["layers"][1]["output_bytes"] == 2 * 128 * 512
    assert problem["costs"] == {"p2p": 5}
    assert problem["memory"] == {"static": 1000, "limit": 1_000_000_000}
    assert problem["units"] == {"time": "us", "memory": "bytes"}
    assert (problem["pp_degree"], problem["microbatches"], problem["placement"]) == (2, 4, "auto")


def test_flags_replace_what_the_file_says(config: Path, capsys: Capture) -> None:
    given = ["--layers", "6", "--link-bandwidth", "2", "--granularity", "half", "--placement", "loop",
             "--chunks", "3", "--no-bias", "--recompute", "none", "--objective", "makespan"]  # fmt: skip
    assert main(["estimate", "--config", str(config), *given]) == 0
    problem = json.loads(capsys.readouterr().out)
    assert len(problem["layers"]) == 2 + 2 * 6
    assert problem["costs"] == {"link": {"latency": 5, "bandwidth": 2000}}
    assert (problem["placement"], problem["chunks"], problem["objective"]) == ("loop", 3, "makespan")
    assert problem["layers"][1]["parameters_bytes"] == 2 * (4 * 512**2 + 2 * 512)
    assert not any("recompute" in layer for layer in problem["layers"])


def test_tables_go_to_the_stream_without_the_problem(config: Path, tmp_path: Path, capsys: Capture) -> None:
    assert main(["estimate", "--config", str(config), "--table"]) == 0
    out, err = capsys.readouterr()
    json.loads(out)
    assert "embedding" in err
    assert main(["estimate", "--config", str(config), "--table", "-o", str(tmp_path / "problem.json")]) == 0
    shown, err = capsys.readouterr()
    assert err == ""
    assert json.loads((tmp_path / "problem.json").read_text()) == json.loads(out)
    # 24 · 128 · 512² for the block's projections, and 4 · 128² · 512 / 2 for its scores
    assert "│ block     │      4 │     0.8 │" in shown
    assert "0.0137 B parameters; 0.01" in shown
    assert "MB" in shown


def test_halves_that_are_equal_share_a_row(config: Path, capsys: Capture) -> None:
    assert main(["estimate", "--config", str(config), "--table", "--granularity", "half"]) == 0
    shown = capsys.readouterr().err
    assert shown.count(".attention") == 3  # once in each table
    assert "│ block.0.attention │      4 │" in shown


def test_presets_are_listed(capsys: Capture) -> None:
    assert main(["estimate", "--list-presets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "Qwen3 32B" in line] == ["qwen3-32b"]


def parsed(*given: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_estimate_flags(parser)
    return vars(parser.parse_args(given))


def test_none_undoes_every_value_that_may_be_absent() -> None:
    """A word of a key keeps its meaning: --recompute none is no recomputation, and --no-qkv-bias is false."""
    undone = {
        f"{section}.{key}": parsed(flag_of(key), "none")[f"{section}.{key}"]
        for section in SECTIONS
        for key, field in flags(section).items()
        if not field.is_required() and field.default is None and key != "qkv_bias"
    }
    assert {key for key, value in undone.items() if value is not None} == {"parallel.recompute"}


def test_a_list_has_a_flag_with_several_words(capsys: Capture) -> None:
    given = parsed("--recompute-modules", "moe_act", "layernorm")
    assert given["parallel.recompute_modules"] == ["moe_act", "layernorm"]
    fixed = ["--preset", "deepseek-v3", "--recompute", "selective"]
    assert main(["estimate", *fixed]) == 2
    assert "or give other recompute_modules" in capsys.readouterr().err
    assert main(["estimate", *fixed, "--recompute-modules", "moe_act"]) == 0


@pytest.mark.parametrize("given", ["none", "bfloat16"])
def test_the_documented_default_undoes_a_preset(given: str, capsys: Capture) -> None:
    """DeepSeek-V3 is trained in FP8; its products then have the type of activations."""
    fixed = ["--preset", "deepseek-v3", "--product-dtype"]
    assert main(["estimate", *fixed, given]) == 0
    wide = capsys.readouterr().out
    assert main(["estimate", *fixed, "fp8"]) == 0
    assert (
        json.loads(wide)["layers"][1]["memory"] != json.loads(capsys.readouterr().out)["layers"][1]["memory"]
    )
    assert main(["estimate", *fixed, "float16"]) == 2
    assert "--product-dtype: found 'float16'; must be fp8, fp4 or the type" in capsys.readouterr().err


def test_a_missing_configuration_is_reported_with_the_flags(capsys: Capture) -> None:
    assert main(["estimate"]) == 2
    assert "--config, --preset: found neither; give one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--preset", "gpt-5"], "--preset: found 'gpt-5'; not a preset. Use one of a100, a100-80gb"),
        (["--config", "no/such.json"], "no/such.json: No such file"),
        (["--preset", "gpt-1.5b", "--heads", "5"], "--heads: found 5; must divide hidden (2304)"),
        (["--preset", "gpt-1.5b", "--dtype", "int4"], "--dtype: found 'int4'"),
        (["--preset", "gpt-1.5b", "--memory-limit", "nan"], "--memory-limit: found nan"),
        (["--preset", "a100-80gb"], "/model: this key is required and absent."),
    ],
)
def test_wrong_input_is_status_2(given: list[str], says: str, capsys: Capture) -> None:
    assert main(["estimate", *given]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err


def test_in_a_pipe(config: Path) -> None:
    made = subprocess.run(
        [sys.executable, "-m", "zbv_solver.commands.cli", "estimate", "--config", "-"],
        input=config.read_text(), capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert json.loads(made.stdout)["pp_degree"] == 2
    assert made.stderr == ""
