"""A run tells whether the costs of its plan were measured with its own program."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from support.plans import unit_problem, write_plan
from zbv_solver.construct.baselines import baseline
from zbv_worker.host.local_ranks import LocalRanks, python_command
from zbv_worker.stage.program import Program, differences

CPU = torch.device("cpu")


def test_every_setting_that_changes_the_costs_is_described() -> None:
    found = Program("bfloat16", has_main_gradients=False).described(CPU)
    assert found["precision"] == "bfloat16"
    assert found["main gradients"] == "no"
    assert found["tf32"] == "no"
    assert found["torch"] == torch.__version__
    assert len(found["device"]) > 2
    assert "nccl" not in found  # gloo has none


def test_tf32_is_described_as_the_model_sets_it() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert Program().described(CPU)["tf32"] == "yes"
    finally:
        torch.set_float32_matmul_precision(before)


def test_each_difference_is_named_with_both_values() -> None:
    planned = {"precision": "float32", "device": "one", "nccl": "2.27.5"}
    own = {"precision": "bfloat16", "device": "one", "torch": "2.13.0"}
    assert list(differences(planned, own)) == [
        "nccl 2.27.5 (here: not used)",
        "precision float32 (here: bfloat16)",
        "torch not stated (here: 2.13.0)",
    ]


def test_a_plan_that_does_not_say_how_it_was_measured_differs_in_nothing() -> None:
    assert list(differences({}, Program().described(CPU))) == []


def test_a_run_warns_of_a_plan_that_was_measured_with_another_program(tmp_path: Path) -> None:
    arguments = ["run", "--model", "zbv_worker.models.tiny:tiny", "--steps", "1", "--threads", "1"]
    for precision in ("bfloat16", "float32"):
        measured = tuple(sorted(Program(precision).described(CPU).items()))
        problem, orders = baseline("1f1b", unit_problem(1, 2))
        plan = write_plan(tmp_path / f"{precision}.json", replace(problem, measured=measured), orders)
        arguments += ["--plan-file", str(plan)]
    with LocalRanks([python_command("zbv_worker.commands.cli", *arguments)], tmp_path) as started:
        started.wait(timeout=240)
        said = started.log(0)
    (warning,) = [line for line in said.splitlines() if "its costs were measured with" in line]
    assert "measured with precision bfloat16 (here: float32). The step may take longer" in warning
