"""What differs between processes: random numbers, errors at the start, and ranks that fail or leave."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from support.failing_ranks import ended
from support.plans import random_plan, searched, unit_problem, write_plan
from support.rank_files import found_by
from zbv_worker.host.local_ranks import LocalRanks, python_command

PROGRAMS = ("drops", "refuses", "fails")
Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """What the ranks saw, by program; one process per rank runs all, one after the other."""
    folder = tmp_path_factory.mktemp("pipeline")
    searched(unit_problem(2, 4)).save(folder / "plan.json")
    ranks = found_by("pipeline_rank", 2, folder, *PROGRAMS)
    return {program: [rank[program] for rank in ranks] for program in PROGRAMS}


def test_ranks_that_are_seeded_alike_drop_other_elements(seen: dict[str, Found]) -> None:
    for rank in seen["drops"]:
        for name in ("first", "second", "again"):
            assert len(rank[name]) == 16  # two layers, four microbatches, each with a recomputation
            assert all(rank[name].count(mask) == 2 for mask in rank[name])
        assert rank["again"] == rank["first"]
    drawn = [mask for rank in seen["drops"] for name in ("first", "second") for mask in rank[name]]
    assert all(drawn.count(mask) == 2 for mask in drawn)


def test_random_numbers_outside_of_the_layers_stay_those_of_the_user(seen: dict[str, Found]) -> None:
    """Loaders that shuffle draw them, and must do so alike on all ranks."""
    first, second = seen["drops"]
    for name in ("first", "second", "evaluated", "again"):
        assert first[f"own {name}"] == second[f"own {name}"]
        assert first[f"state of {name}"] == (name == "evaluated")
    assert first["own first"] == first["own again"]


def test_an_error_at_the_start_is_raised_on_all_ranks(seen: dict[str, Found]) -> None:
    first, second = (rank["said"] for rank in seen["refuses"])
    for said in (first, second):
        assert "found 2 layers; the plan has 4 stages" in said[0]
        assert "found microbatches=7; the plan has 4" in said[1]
        assert "found data_rank=2; must be a rank of the pipeline, 0 to 1." in said[2]
        assert said[3].startswith("Disagreement: the ranks differ in data rank (rank 0: 0; rank 1: 1)")
        assert said[4].startswith("Disagreement: the ranks differ in model")
        assert said[6].startswith("Disagreement: the ranks differ in model")  # only one shares parameters
        assert "found a plan on rank 0, and no plan on rank 1" in said[7]
    assert second[5].startswith("InvalidRun: layer 2: the function returned a int")
    assert first[5] == second[5].replace("InvalidRun: ", "InvalidRun: rank 1 cannot start: ")


def test_a_failed_rank_fails_its_peers_at_once_with_its_reason(seen: dict[str, Found]) -> None:
    first, second = (rank["said"] for rank in seen["fails"])
    assert first[0] == second[0] == "nothing"
    assert second[1] == "ValueError: this layer is broken"
    assert first[1].startswith("PeerLost: rank 1 lost: ValueError: this layer is broken (pipeline_rank.py:")
    for said in (first, second):
        assert "this pipeline has failed in an earlier call (rank " in said[2]


P = 3
LOST = P - 1


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_plan(tmp_path_factory.mktemp("plan") / "plan.json", *random_plan(P, 4))


@pytest.mark.parametrize("way", ["returns", "raises", "SIGKILL", "SIGSTOP"])
def test_the_other_ranks_name_the_rank_that_has_left_and_end(plan: Path, tmp_path: Path, way: str) -> None:
    command = python_command("support.leaving_pipeline_rank", str(plan), way)
    with LocalRanks([command] * P, tmp_path / "logs") as ranks:
        ended(ranks, set(range(P)) - {LOST}, time.monotonic())
        for rank in range(P):
            log = ranks.log(rank)
            if rank != LOST:
                assert ranks.processes[rank].returncode == 0, log
                assert f"rank {LOST}" in log, "\n".join(ranks.log(each) for each in range(P))
                assert any(kind in log for kind in ("PeerLost", "ChannelTimeout", "Disagreement")), log
