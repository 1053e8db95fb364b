"""Thumbnails of plans: their size, a row for each rank, and transparent idle time."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from zbv_service.plans.thumbnail import HEIGHT, WIDTH, thumbnail
from zbv_solver.export.palette import KIND_FILLS, rgb
from zbv_solver.plans.orders import Action, Orders
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.assemble import make_plan


def one_after_the_other(ranks: int, microbatches: int, **more: Any) -> Plan:
    """A plan that runs one microbatch at a time, so that ranks are idle most of the time."""
    costs = {"forward": 1, "backward_input": 1, "backward_weight": 1, **more}
    problem = parse_problem({"pp_degree": ranks, "microbatches": microbatches, "costs": costs})
    lists: list[list[Action]] = [[] for _ in range(ranks)]
    for j in range(microbatches):
        for stage in range(problem.n_stages):
            lists[problem.placement.rank_of[stage]].append(Action(stage, "F", j))
        for stage in reversed(range(problem.n_stages)):
            actions = [Action(stage, "I", j), Action(stage, "W", j)]
            lists[problem.placement.rank_of[stage]] += actions
    return make_plan(problem, Orders.from_actions(lists), method="sequential")


def pixels(plan: Plan) -> NDArray[np.uint8]:
    picture = Image.open(io.BytesIO(thumbnail(plan)))
    assert (picture.format, picture.mode, picture.size) == ("PNG", "RGBA", (WIDTH, HEIGHT))
    return np.asarray(picture)


def test_every_rank_has_a_row_with_the_colours_of_its_actions() -> None:
    found = pixels(one_after_the_other(2, 1))
    # Twelve actions on two ranks: rank 0 begins with 0F0 and rank 1 waits for it.
    first, second = found[HEIGHT // 8], found[HEIGHT // 2 + HEIGHT // 8]
    assert tuple(first[20]) == (*rgb(KIND_FILLS[0]), 255)
    assert second[20, 3] == 0
    assert (first[:, 3] > 0).mean() < 0.8
    assert set(map(tuple, found[found[..., 3] == 255].reshape(-1, 4)[:, :3])) <= set(map(rgb, KIND_FILLS))
    assert not found[HEIGHT // 2 - 1, :, 3].any(), "rows are apart"


def test_wide_bars_are_separated() -> None:
    row = pixels(one_after_the_other(1, 4))[HEIGHT // 2, :, 3]
    assert np.count_nonzero(row == 0) == 24
    row = pixels(one_after_the_other(1, 200))[HEIGHT // 2, :, 3]
    assert np.all(row > 0)


@pytest.mark.parametrize("ranks", [HEIGHT // 2 + 1, HEIGHT, HEIGHT + 1, 2 * HEIGHT + 7])
def test_many_ranks_fill_the_picture(ranks: int) -> None:
    found = pixels(one_after_the_other(ranks, 1))
    assert found[..., 3].any(axis=1).all()


def test_a_plan_without_duration_is_an_empty_picture() -> None:
    assert not pixels(one_after_the_other(2, 1, forward=0, backward_input=0, backward_weight=0)).any()
