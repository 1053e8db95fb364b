"""The model of docs/training.md trains, and every option on the page exists."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from random import Random

import pytest
import torch
from support.paths import ROOT
from support.selfcheck import random_orders
from support.trained import CPU, train_in_threads
from zbv_solver import load_plan
from zbv_solver.commands.cli import main as plan
from zbv_solver.problem.placement import Placement
from zbv_solver.problem.problem import Costs, Memory, Problem
from zbv_worker.commands.cli import main
from zbv_worker.model.protocol import PipelineModel
from zbv_worker.training.options import TrainingOptions

PAGE = (ROOT / "docs" / "training.md").read_text()


def test_the_model_of_the_page_trains_the_same_for_any_partition() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict[str, type] = {}
    exec(code, names)
    model = names["layers"](width=8)
    assert isinstance(model, PipelineModel)
    whole = model.build_stage(0, 1, CPU).state_dict()
    parts = [model.build_stage(stage, 4, CPU).state_dict() for stage in range(4)]
    assert {name: tensor.tolist() for part in parts for name, tensor in part.items()} == {
        name: tensor.tolist() for name, tensor in whole.items()
    }
    placement = Placement.of("v", 2)
    ones = (1.0,) * 4
    problem = Problem(placement, 2, Costs(ones, ones, ones, ones[1:]), Memory.unlimited(placement))
    found = train_in_threads(
        problem, random_orders(problem, Random(0)), TrainingOptions(), 2, names["layers"]
    )
    x, y = model.microbatch(0, 0)
    torch.testing.assert_close(x.roll(1, dims=1), y)
    assert found.losses[1] < found.losses[0]


def test_the_commands_of_the_page_plan_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    (tmp_path / "mymodel.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    commands = re.search(r"^zbv-worker (estimate mymodel.*)\nzbv (plan .*)$", PAGE, flags=re.MULTILINE)
    assert commands is not None
    assert main(shlex.split(commands[1])) == 0
    assert plan([*shlex.split(commands[2]), "--effort", "quick"]) == 0
    del sys.modules["mymodel"]
    cut = load_plan("plan.json").problem.model
    assert cut is not None
    assert [name for names in cut.partition for name in names] == list("01234567")


def test_every_option_of_the_page_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    table = PAGE[PAGE.index("## What the options do") :]
    assert set(re.findall(r"`(--[a-z-]+)", table)) <= known
