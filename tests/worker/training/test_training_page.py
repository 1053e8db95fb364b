"""The model of docs/training.md trains, and every option on the page exists."""

from __future__ import annotations

import re
from random import Random

import pytest
import torch
from support.paths import ROOT
from support.selfcheck import random_orders
from support.trained import CPU, train_in_threads
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


def test_every_option_of_the_page_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    table = PAGE[PAGE.index("## What the options do") :]
    assert set(re.findall(r"`(--[a-z-]+)", table)) <= known
