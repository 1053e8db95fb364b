"""``zbv cut`` as users meet it: statuses, streams, messages."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import executor_layers
from zbv_solver.commands.cli import main

Capture = pytest.CaptureFixture[str]


layer = partial(executor_layers.layer, held=2)
MODEL: dict[str, Any] = {
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
    layers = [
        layer("embedding", 1) | held,
        layer("block", 2, repeat=6),
        layer("head", 1),
    ]
    model = written(tmp_path / "model.json", {**MODEL, "layers": layers, "memory": {"limit": 28}})
    flags = ["--executor", "torch", "--schedule", "1F1B", "GPipe", "--no-free-order"]
    assert main(["cut", model, *flags]) == 0
    out = capsys.readouterr().out
    assert "% above the even cut, which ignores the memory" in out
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
    ("flags", "message"),
    [
        ("--virtual-stages 0", "--virtual-stages: found 0 virtual stages"),
        ("--virtual-stages 2 -3", "--virtual-stages: found -3 virtual stages"),
        ("--virtual-stages 999999999", "--virtual-stages: found 999999999 virtual stages; must"),
        ("--group-size 0", "--group-size: found 0; must be at least 1"),
        ("--group-size 9", "--group-size: found group size 9"),
        ("--group-size 9 --virtual-stages 2", "found group size 9; Megatron-LM needs"),
        ("--group-size 2 --virtual-stages 1", "--group-size: found group size 2 with one"),
        ("--group-size 5 --executor torch", "--group-size: found it and executor torch"),
        ("--schedule 1F1B", "--schedule: found it and executor megatron"),
        ("--schedule Foo --executor torch", "--schedule: found schedule 'Foo'; must be"),
        (
            "--schedule ZBVZeroBubble --virtual-stages 3 --executor torch",
            "--virtual-stages, --schedule: found 4 microbatches and 3 stages",
        ),
        ("--virtual-stages 9 --executor torch", "model.json: /layers: found 8 separable"),
        ("--time-limit 0", "--time-limit"),
        ("--time-limit nan", "--time-limit"),
        ("--layout Et*4|tL", "--layout: found the modules Et*5L; the model has Et*6L"),
        ("--layout Et*3|t*3L --virtual-stages 2", "--layout: found 2 stages on 2 ranks, and"),
        ("--layout 3,3 --virtual-stages 1 2", "--virtual-stages: found 2 numbers"),
        ("--layout 3,3 --group-size 2", "--group-size: found group size 2 with one virtual stage"),
        ("--layout 3,3 --recompute per-stage", "--recompute: found per-stage"),
    ],
)
def test_mistakes_in_flags_are_named(flags: str, message: str, tmp_path: Path, capsys: Capture) -> None:
    model = written(tmp_path / "model.json", MODEL)
    assert main(["cut", model, "--executor", "megatron", "--effort", "quick", *flags.split()]) == 2
    out, err = capsys.readouterr()
    assert (out, message in err) == ("", True), err


STAGES = {"costs": {"forward": 1, "backward_input": 1, "backward_weight": 1}, "layers": None}
ONE_LAYER = {"layers": [layer("block", 2)], "cut": {"allow_empty": True}}
PREDICTING = {"layers": [*MODEL["layers"][:2], layer("mtp", 2), MODEL["layers"][2]]}


@pytest.mark.parametrize(
    ("changes", "executor", "status", "message"),
    [
        ({"memory": {"limit": 3}}, "megatron", 3, "the closest cut would need"),
        ({"layers": [layer("head", 1), layer("block", 1)]}, "megatron", 2, "/layers: found layers with"),
        (STAGES, "megatron", 2, "/layers"),
        *((ONE_LAYER, each, 2, "/layers: found 1 separable") for each in ("megatron", "torchtitan", "torch")),
        (PREDICTING, "torchtitan", 2, "found 'mtp', which belongs to multi-token prediction"),
    ],
)
def test_layers_that_cannot_be_cut_are_refused(
    changes: dict[str, Any], executor: str, status: int, message: str, tmp_path: Path, capsys: Capture
) -> None:
    document = {key: value for key, value in (MODEL | changes).items() if value is not None}
    model = written(tmp_path / "model.json", document)
    assert main(["cut", model, "--executor", executor, "--effort", "quick"]) == status
    out, err = capsys.readouterr()
    assert (out, message in err) == ("", True), err


def test_a_given_cut_is_timed_and_compared(tmp_path: Path, capsys: Capture) -> None:
    model, plan = written(tmp_path / "model.json", MODEL), str(tmp_path / "plan.json")
    flags = ["--executor", "megatron", "--effort", "quick", "--layout", "Et*5|tL"]
    assert main(["cut", model, *flags, "--json", "-o", plan]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["layout"], found["schedule"], found["fits"]) == ("Et*5|tL", "1F1B", True)
    assert found["lower_bound"] <= found["best_of_schedule"]["objective"] < found["objective"]
    assert found["best"]["gain"] >= found["best_of_schedule"]["gain"] > 0
    assert found["bottleneck"]["stage"] == found["bottleneck"]["rank"] == 0
    assert [rank["busy"] for rank in found["ranks"]] == [132, 60]
    assert all(rank["busy"] + rank["waiting"] == found["objective"] for rank in found["ranks"])
    assert [stage["modules"] for stage in found["stages"]] == ["Ettttt", "tL"]
    assert '"Et*5|tL"' in found["settings"]
    assert json.loads(Path(plan).read_text())["metrics"]["span"] == found["objective"]
    problem = written(tmp_path / "problem.json", json.loads(Path(plan).read_text())["problem"])
    assert main(["check", problem, plan]) == 0
    capsys.readouterr()
    assert main(["cut", model, *flags]) == 0
    out = capsys.readouterr().out
    assert "Megatron-LM takes it." in out
    assert "Stage 0 is the bottleneck." in out
    assert "No cut under this schedule is shorter than" in out
    assert "The best cut of all schedules (interleaved-1F1B" in out


@pytest.mark.parametrize(
    ("flags", "schedule"),
    [
        (["--executor", "megatron", "--layout", "1,2,1,2"], ("interleaved-1F1B", 2, 2)),
        (["--executor", "megatron", "--layout", "1,2,1,2", "--group-size", "4"], ("interleaved-1F1B", 2, 4)),
        (["--executor", "torchtitan", "--layout", "1,2,1,2"], ("Interleaved1F1B", 2, None)),
        (
            ["--executor", "torchtitan", "--layout", "1,2,1,2", "--schedule", "ZBVZeroBubble"],
            ("ZBVZeroBubble", 2, None),
        ),
        (["--executor", "torch", "--layout", "3,3"], ("1F1B", 1, None)),
        (["--executor", "torch", "--layout", "3,3", "--schedule", "GPipe"], ("GPipe", 1, None)),
    ],
)
def test_the_schedule_of_a_given_cut_is_the_executors_unless_flags_fix_it(
    flags: list[str], schedule: tuple[str, int, int | None], tmp_path: Path, capsys: Capture
) -> None:
    model = written(tmp_path / "model.json", MODEL)
    assert main(["cut", model, *flags, "--effort", "quick", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["schedule"], found["virtual_stages"], found["group_size"]) == schedule


def test_a_given_cut_that_does_not_fit_is_no_plan(tmp_path: Path, capsys: Capture) -> None:
    model, plan = written(tmp_path / "model.json", MODEL | {"memory": {"limit": 18}}), tmp_path / "plan.json"
    flags = ["--executor", "megatron", "--effort", "quick", "--layout", "Et*5|tL"]
    assert main(["cut", model, *flags]) == 0
    assert "It does not fit the memory of rank 0." in capsys.readouterr().out
    assert main(["cut", model, *flags, "-o", str(plan)]) == 3
    assert not plan.exists()
    assert "rank 0: 18 < 24" in capsys.readouterr().err


def test_first_and_last_are_transformer_layers_and_refused_schedules_are_named(
    tmp_path: Path, capsys: Capture
) -> None:
    model = written(tmp_path / "model.json", MODEL | {"cut": {"first": 3, "last": 3}})
    flags = ["--executor", "megatron", "--effort", "quick", "--no-free-order", "--virtual-stages", "1", "2"]
    assert main(["cut", model, *flags]) == 0
    out = capsys.readouterr().out
    assert '--pipeline-model-parallel-layout "Ettt|tttL"' in out
    assert "interleaved-1F1B with 2 virtual stages has no cut: found 3 transformer layers on the first" in out
    assert main(["cut", model, *flags, "--json"]) == 0
    refused = json.loads(capsys.readouterr().out)["refused"]
    assert {(each["schedule"], each["virtual_stages"]) for each in refused} == {("interleaved-1F1B", 2)}


def test_a_model_with_a_vision_encoder_has_settings(tmp_path: Path, capsys: Capture) -> None:
    layers = [
        layer("patches", 1),
        layer("vision", 1, repeat=3),
        layer("projector", 1),
        *MODEL["layers"],
    ]
    model = written(tmp_path / "model.json", MODEL | {"layers": layers})
    flags = ["--executor", "megatron", "--effort", "quick", "--no-free-order", "--virtual-stages", "1"]
    assert main(["cut", model, *flags]) == 0
    assert '--pipeline-model-parallel-layout "Ettt|tttL"' in capsys.readouterr().out


def test_an_equal_even_cut_is_called_that(tmp_path: Path, capsys: Capture) -> None:
    blocks = {**MODEL, "layers": [layer("block", 2, repeat=8)]}
    model = written(tmp_path / "model.json", blocks)
    flags = ["--executor", "megatron", "--effort", "quick", "--no-free-order", "--virtual-stages", "1"]
    assert main(["cut", model, *flags]) == 0
    out = capsys.readouterr().out
    assert "as long as the even cut" in out
    assert "0.0%" not in out
