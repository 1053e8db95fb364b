"""Predicted and measured layouts: what is compared, and the simulation of shared cores."""

from __future__ import annotations

import pytest
from support.plans import unit_problem
from zbv_solver.plans.plan import Plan
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search

from benchmarks.worker.layouts import LayoutsWorkload, SmallModel
from benchmarks.worker.shared_cores import PerStep, step_time


@pytest.fixture(scope="module")
def plan() -> Plan:
    return search(unit_problem(2, 6), SearchOptions(effort="quick"))


def nothing(ranks: int) -> PerStep:
    return PerStep([0.0] * ranks, [0.0] * ranks)


@pytest.mark.parametrize("replicas", [1, 3])
def test_with_a_core_each_a_step_takes_the_span(plan: Plan, replicas: int) -> None:
    found = step_time(plan, replicas, 2 * replicas, nothing(2))
    assert found == pytest.approx(plan.metrics.span, rel=1e-3)


def test_on_one_core_a_step_takes_the_work_of_all(plan: Plan) -> None:
    work = 2 * 6 * 2 * 3  # ranks, microbatches, chunks, and F, I and W of one unit
    assert step_time(plan, 1, 1, nothing(2)) == pytest.approx(work, rel=0.05)
    assert step_time(plan, 4, 1, nothing(2)) == pytest.approx(4 * work, rel=0.05)


def test_exchanges_take_time_and_updates_share_cores() -> None:
    alone = search(unit_problem(1, 4), SearchOptions(effort="quick"))
    work = alone.metrics.span
    once = PerStep([5.0], [3.0])
    assert step_time(alone, 1, 1, once) == pytest.approx(work + 3.0)
    assert step_time(alone, 2, 2, once) == pytest.approx(work + 5.0 + 3.0)
    assert step_time(alone, 2, 1, once) == pytest.approx(2 * work + 5.0 + 2 * 3.0)


def test_models_are_those_of_the_worker() -> None:
    model = LayoutsWorkload().models[0]
    assert isinstance(model, SmallModel)
    arguments, document = model.spec(2)["arguments"], model.document()
    assert arguments["sequences"] == 2
    assert document["model"]["layers"] == arguments["layers"]
    assert document["model"]["sequence"] == arguments["length"]
