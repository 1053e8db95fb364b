"""A plan for every step on real ranks: results of one process, and plans of a data loader."""

from __future__ import annotations

from typing import Any

import pytest
from support.per_step_rank import UNPLANNED
from support.rank_files import found_by

STEPS = 8


@pytest.fixture(scope="module", params=["all ranks", "data rank", "loader"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    found = found_by("per_step_rank", 2, tmp_path_factory.mktemp("per-step"), str(STEPS), request.param)
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


def test_steps_run_the_plans_of_the_loader(ranks: list[dict[str, Any]]) -> None:
    if ranks[0]["mode"] == "loader":
        for step, (given, ran) in enumerate(zip(ranks[0]["given"], ranks[1]["plans"], strict=True)):
            assert (given is None) == (step == UNPLANNED)
            assert given in (None, ran)
