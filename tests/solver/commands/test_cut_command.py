"""``zbv cut`` as users meet it: statuses, streams, messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from zbv_solver.commands.cli import main

Capture = pytest.CaptureFixture[str]


def layer(name: str, time: int, **more: Any) -> dict[str, Any]:
    memory = {"forward": 2, "backward_input": -2, "backward_weight": 0}
    times = {"forward": time, "backward_input": time, "backward_weight": time}
    return {"name": name, **times, "memory": memory, **more}


MODEL = {
    "pp_degree": 2,
    "microbatches": 4,
    "layers": [layer("embedding", 1), layer("block", 2, repeat=6), layer("head", 3)],
}


def written(path: Path, document: object) -> str:
    path.write_text(json.dumps(document))
    return str(path)


def test_the_best_cut_is_printed_and_is_a_plan(tmp_path: Path, capsys: Capture) -> None:
    model, plan = written(tmp_path / "model.json", MODEL), str(tmp_path / "plan.json")
    flags = ["--executor", "megatron", "--effort", "quick"]
    assert main(["cut", model, *flags, "--json", "-o", plan]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["status"] == "optimal"
    assert found["lower_bound"] == found["objective"] <= found["even_cut"]
    assert "--pipeline-model-parallel-layout" in found["settings"]
    assert found["free_order"]["lower_bound"] <= found["free_order"]["objective"] <= found["objective"]
    written_plan = json.loads(Path(plan).read_text())
    assert written_plan["metrics"]["span"] == found["objective"]
    assert written_plan["partition"] == found["partition"]
    problem = written(tmp_path / "problem.json", written_plan["problem"])
    assert main(["check", problem, plan]) == 0
    assert main(["export", plan, "--format", "torch-csv", "-o", str(tmp_path / "plan.csv")]) == 0


def test_a_time_limit_ends_the_search_with_what_is_known(tmp_path: Path, capsys: Capture) -> None:
    model = written(tmp_path / "model.json", MODEL)
    flags = ["--executor", "megatron", "--effort", "thorough", "--json", "--no-free-order"]
    assert main(["cut", model, *flags, "--time-limit", "0.001"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["lower_bound"] <= found["objective"]
    assert found["status"] == "feasible"
    assert main(["cut", model, *flags]) == 0
    without_limit = json.loads(capsys.readouterr().out)
    assert (without_limit["status"], without_limit["objective"] < found["objective"]) == ("optimal", True)


def test_schedules_that_the_time_limit_left_out_are_named(tmp_path: Path, capsys: Capture) -> None:
    model = written(tmp_path / "model.json", MODEL)
    flags = ["--executor", "megatron", "--no-free-order", "--time-limit", "1e-9"]
    assert main(["cut", model, *flags]) == 0
    out = capsys.readouterr().out
    assert "The time limit ended the search before 6 of 7 schedules were tried" in out
    assert out.count(" – ") == 2 * 6  # the best cut and the even cut
    assert "inf" not in out
    assert main(["cut", model, *flags, "--json"]) == 0
    text = capsys.readouterr().out
    assert "Infinity" not in text
    (first, *others) = json.loads(text)["schedules"]
    assert (first["searched"], first["objective"]) == (True, json.loads(text)["objective"])
    assert [(each["searched"], each["objective"]) for each in others] == [(False, None)] * 6


def test_an_even_cut_that_does_not_fit_is_no_comparison(tmp_path: Path, capsys: Capture) -> None:
    held = {"memory": {"forward": 10, "backward_input": -10, "backward_weight": 0}}
    layers = [layer("embedding", 1) | held, layer("block", 2, repeat=6), layer("head", 1)]
    model = written(tmp_path / "model.json", {**MODEL, "layers": layers, "memory": {"limit": 28}})
    flags = ["--executor", "torch", "--schedule", "1F1B", "GPipe", "--no-free-order"]
    assert main(["cut", model, *flags]) == 0
    out = capsys.readouterr().out
    assert "% above the even cut, which does not fit" in out
    assert "inf" not in out
    assert out.count("none fits") == 2  # the best cut and the bound of GPipe, which holds all microbatches


def test_without_a_fitting_cut_the_time_limit_is_named(tmp_path: Path, capsys: Capture) -> None:
    model = written(tmp_path / "model.json", MODEL | {"memory": {"limit": 15}})
    flags = ["--executor", "megatron", "--effort", "quick", "--no-free-order"]
    assert main(["cut", model, *flags, "--time-limit", "1e-9"]) == 3
    err = capsys.readouterr().err
    assert "It is not proved that no other cut fits. The time limit ended the search" in err
    assert "give a longer --time-limit" in err
    assert main(["cut", model, *flags]) == 0


def test_the_summary_has_the_settings(tmp_path: Path, capsys: Capture) -> None:
    model = written(tmp_path / "model.json", MODEL)
    flags = ["--executor", "torchtitan", "--effort", "quick", "--virtual-stages", "1", "--no-free-order"]
    assert main(["cut", model, *flags]) == 0
    out = capsys.readouterr().out
    assert "proved optimal for this schedule" in out
    assert 'module_fqns_per_model_part = [\n        ["tok_embeddings", "layers.0"' in out
    assert "any order" not in out


@pytest.mark.parametrize(
    ("changes", "flags", "status", "message"),
    [
        ({}, ["--virtual-stages", "0"], 2, "--virtual-stages: found 0 virtual stages"),
        ({}, ["--virtual-stages", "2", "-3"], 2, "--virtual-stages: found -3 virtual stages"),
        ({}, ["--virtual-stages", "999999999"], 2, "--virtual-stages: found 999999999 virtual stages; must"),
        ({}, ["--group-size", "0"], 2, "--group-size: found 0; must be at least 1"),
        ({}, ["--group-size", "-4"], 2, "--group-size: found -4; must be at least 1"),
        ({}, ["--group-size", "9"], 2, "--group-size: found group size 9"),
        ({}, ["--group-size", "2", "--virtual-stages", "1"], 2, "--group-size: found group size 2 with one"),
        ({}, ["--schedule", "1F1B"], 2, "--schedule: found it and executor megatron"),
        ({}, ["--executor", "torch", "--group-size", "5"], 2, "--group-size: found it and executor torch"),
        ({}, ["--executor", "torch", "--schedule", "Foo"], 2, "--schedule: found schedule 'Foo'; must be"),
        (
            {},
            ["--executor", "torch", "--schedule", "ZBVZeroBubble", "--virtual-stages", "3"],
            2,
            "--virtual-stages, --schedule: found 4 microbatches and 3 stages",
        ),
        ({}, ["--executor", "torch", "--virtual-stages", "9"], 2, "model.json: /layers: found 8 separable"),
        ({}, ["--time-limit", "0"], 2, "--time-limit"),
        ({}, ["--time-limit", "nan"], 2, "--time-limit"),
        ({}, ["--group-size", "9", "--virtual-stages", "2"], 2, "found group size 9; Megatron-LM needs"),
        ({"memory": {"limit": 3}}, [], 3, "the closest cut would need"),
        ({"layers": [layer("head", 1), layer("block", 1, repeat=4)]}, [], 2, "/layers: found layers with"),
        (
            {"layers": None, "costs": {"forward": 1, "backward_input": 1, "backward_weight": 1}},
            [],
            2,
            "/layers",
        ),
    ],
)
def test_mistakes_are_named(
    changes: dict[str, Any], flags: list[str], status: int, message: str, tmp_path: Path, capsys: Capture
) -> None:
    document = {key: value for key, value in (MODEL | changes).items() if value is not None}
    model = written(tmp_path / "model.json", document)
    assert main(["cut", model, "--executor", "megatron", "--effort", "quick", *flags]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
