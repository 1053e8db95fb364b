"""Programs of a user on two ranks of a V, with a searched plan; the programs are in support.pipeline_rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.plans import searched, unit_problem
from support.rank_files import found_by

PROGRAMS = (
    "accumulates",
    "passes_values",
    "varies",
    "lacks_keyword",
    "shares_data",
    "drops",
    "trains",
    "factories",
    "refuses",
    "fails",
)
Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("pipeline")
    searched(unit_problem(2, 4)).save(made / "plan.json")
    return made


@pytest.fixture(scope="module")
def seen(folder: Path) -> dict[str, Found]:
    """What the ranks saw, by program; one process per rank runs all, one after the other."""
    ranks = found_by("pipeline_rank", 2, folder, *PROGRAMS)
    return {program: [rank[program] for rank in ranks] for program in PROGRAMS}


def test_gradients_losses_and_outputs_are_those_of_one_process(seen: dict[str, Found]) -> None:
    first, second = seen["accumulates"]
    assert max(first["apart"] + second["apart"]) < 1e-6
    assert len(first["loss"]) == 6  # three steps and their evaluations
    assert max(first["loss"]) < 1e-6
    assert first["outputs"] < 1e-6
    assert second["loss"] == []  # the last stage of a V is on rank 0


def test_names_are_those_of_the_whole_model(seen: dict[str, Found]) -> None:
    names = [name for rank in seen["accumulates"] for name in rank["names"]]
    assert sorted(names) == sorted(f"{layer}.0.{kind}" for layer in range(5) for kind in ("weight", "bias"))


def test_values_keywords_and_auxiliary_losses_reach_every_stage(seen: dict[str, Found]) -> None:
    """The first step runs twice, because its auxiliary losses did not know that the loss has weights."""
    first, second = seen["passes_values"]
    assert max(first["apart"], second["apart"]) < 1e-6
    assert (first["outputs"], second["outputs"]) == (4, None)
    assert second["boundaries"] == first["boundaries"]
    assert "int64" in first["boundaries"]["0"]
    assert second["auxiliary"] > 0
    for rank in (first, second):
        assert "found the keyword 'mask', which no layer takes" in rank["said"]


def test_microbatches_may_have_different_shapes(seen: dict[str, Found]) -> None:
    first, second = seen["varies"]
    assert max(first["apart"] + second["apart"]) < 1e-6
    assert first["rows"] == [2, 1, 1, 4]
    largest = "([4, 6] float32 with gradient, [4] int64, None)"
    assert set(first["boundaries"].values()) == set(second["boundaries"].values()) == {largest}


def test_means_over_microbatches_of_different_sizes_are_refused(seen: dict[str, Found]) -> None:
    first, second = (rank["said"] for rank in seen["varies"])
    assert first.startswith("ModelError: the loss returned means over microbatches with targets of 6 to 18")
    assert second.startswith("PeerLost: rank 0 lost: the loss returned means over microbatches")


def test_one_rank_has_the_data_of_all(seen: dict[str, Found]) -> None:
    first, second = seen["shares_data"]
    assert max(first["apart"] + second["apart"]) < 1e-6
    assert first["evaluated"] == pytest.approx([0, 0, 4] * 2, abs=1e-6)
    assert second["evaluated"] == []


def test_data_on_the_wrong_rank_or_nowhere_is_refused(seen: dict[str, Found]) -> None:
    first, second = (rank["said"] for rank in seen["shares_data"])
    for source, (mine, other) in enumerate(((first[:2], second[:2]), (second[2:4], first[2:4]))):
        none, uneven = mine
        assert none.startswith(f"InvalidRun: found no batch; rank {source} is the pipeline's data rank")
        assert "inputs has 3 rows; must be a multiple" in uneven
        assert other == [said.replace("InvalidRun: ", f"InvalidRun: rank {source}: ") for said in mine]
    assert second[4].startswith("InvalidRun: found a batch on rank 1; the pipeline's data rank is 0")
    assert first[4].startswith("PeerLost: rank 1 lost: found a batch on rank 1")


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


def test_a_rank_that_lacks_a_keyword_is_named(seen: dict[str, Found]) -> None:
    for rank in seen["lacks_keyword"]:
        assert "rank 1 was not given the keyword 'scale', which its layers take and rank 0" in rank["said"]


def test_optimizers_schedules_and_clipping_train_the_same_model(seen: dict[str, Found]) -> None:
    for rank in seen["trains"]:
        assert max(rank["norms"]) < 1e-6
        assert rank["state"] < 1e-5


def test_the_whole_state_is_gathered_on_rank_0_and_loaded_everywhere(seen: dict[str, Found]) -> None:
    first, second = seen["trains"]
    assert first["whole names"]
    assert first["whole"] < 1e-5
    assert "whole" not in second
    assert first["loaded"] == second["loaded"] == 0.0


def test_a_trace_has_every_action_of_all_ranks(seen: dict[str, Found], folder: Path) -> None:
    first, second = seen["trains"]
    plan = json.loads((folder / "plan.json").read_text())
    assert first["traced"] == second["traced"] == plan["ranks"]
    written = json.loads((folder / "trace.json").read_text())["traceEvents"]
    named = {event["name"] for event in written if event["ph"] == "X"}
    assert named.issuperset(action for rank in plan["ranks"] for action in rank)


def test_only_the_layers_of_the_rank_are_built(seen: dict[str, Found]) -> None:
    assert [rank["built"] for rank in seen["factories"]] == [rank["names"] for rank in seen["factories"]]
    assert sorted(name for rank in seen["factories"] for name in rank["built"]) == list("abcde")


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
