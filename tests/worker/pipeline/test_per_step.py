"""A plan for every step on real ranks: results of one process, no step waits, and the planner's process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.per_step_rank import KILLED, UNANNOUNCED
from zbv_worker.host.local_ranks import LocalRanks, python_command

STEPS = 20


@pytest.fixture(scope="module", params=["all ranks", "data rank", "killed"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("per-step")
    command = python_command("support.per_step_rank", str(folder), str(STEPS), request.param)
    with LocalRanks([command] * 2, folder) as started:
        started.wait(120)
    found = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]
    return [{**each, "mode": request.param} for each in found]


def test_losses_and_gradients_are_those_of_one_process(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert len(rank["found"]) == STEPS
        assert max(step["loss"] for step in rank["found"]) < 1e-6
        assert max(step["gradients"] for step in rank["found"]) < 1e-5


def test_all_ranks_run_the_same_plan_and_every_step_another(ranks: list[dict[str, Any]]) -> None:
    first, second = ranks
    assert first["plans"] == second["plans"]
    assert len(set(first["plans"])) == STEPS


def test_no_step_waits_and_every_plan_is_counted(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        report = rank["report"]
        assert report["waited"] <= report["restarts"]
        assert report["agreed"] == STEPS
        assert report["planned"] + report["late"] + report["constructed"] == STEPS
        if rank["mode"] != "killed":
            assert report["constructed"] == 2  # the first step and one more are not announced
            assert report["planned"] > 0
            assert report["planning_seconds"] > 0
    assert {0, UNANNOUNCED} < {*range(STEPS)}


def test_the_process_is_started_again_once_and_ends_with_the_pipeline(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["ended"] for rank in ranks)
    restarts = sum(rank["report"]["restarts"] for rank in ranks)
    assert restarts == (1 if ranks[0]["mode"] == "killed" else 0)
    if restarts:
        assert ranks[0]["report"]["constructed"] >= STEPS - max(KILLED)
