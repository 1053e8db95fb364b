"""Searches for durations that vary: what the plan states, and that it is chosen by simulation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import zbv_solver as zbv
from support.problems import uniform
from zbv_solver.errors import InvalidInput
from zbv_solver.jitter.noise import Jitter
from zbv_solver.plans.plan import Plan, plan_json
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.problem import Problem
from zbv_solver.timing.step_times import iteration_times

JITTER = Jitter.of(action=0.1, transfer=0.3)
PROBLEM = uniform(4, 8, limit=8, p2p=1)
BLOCK = {"name": "block", "forward": 1, "backward_input": 1, "backward_weight": 1, "repeat": 6}
LAYERS = zbv.parse({"pp_degree": 2, "microbatches": 3, "layers": [BLOCK]})


@pytest.fixture(scope="module")
def planned() -> Plan:
    return zbv.plan(PROBLEM, "quick")


@pytest.fixture(scope="module")
def chosen() -> Plan:
    return zbv.plan(PROBLEM, "quick", jitter=JITTER, quantile=0.95)


def test_the_plan_states_jitter_quantile_and_its_own_simulation(planned: Plan, chosen: Plan) -> None:
    extra = chosen.provenance.extra
    assert extra["jitter"] == {"action": 0.1, "rank": 0, "transfer": 0.3}
    assert extra["quantile"] == 0.95
    assert chosen.simulation == zbv.simulate(chosen, JITTER)
    assert chosen.metrics.lower_bound == planned.metrics.lower_bound
    assert chosen.metrics.gap == pytest.approx(chosen.objective / chosen.metrics.lower_bound - 1)
    checked = zbv.check(plan_json(chosen), PROBLEM)
    assert any(claim.pointer == "/simulation" and claim.is_verified for claim in checked.claims)


def test_the_plan_is_better_when_durations_vary(planned: Plan, chosen: Plan) -> None:
    before, after = (
        np.quantile(iteration_times(PROBLEM, plan.orders, JITTER, scenarios=2000, seed=5).span, 0.95)
        for plan in (planned, chosen)
    )
    assert after < before


def test_the_number_of_threads_does_not_change_the_plan(chosen: Plan) -> None:
    again = zbv.plan(PROBLEM, "quick", jitter=JITTER, quantile=0.95, workers=2)
    assert again.plan_id == chosen.plan_id
    assert again.simulation == chosen.simulation


def test_without_jitter_the_plan_is_the_planned_one(planned: Plan) -> None:
    found = zbv.plan(PROBLEM, "quick", jitter="0")
    assert found.plan_id == planned.plan_id
    assert found.simulation is not None
    assert found.simulation.spans.p95_span == pytest.approx(planned.metrics.span)


def test_layers_keep_their_cut_and_its_bound() -> None:
    found = zbv.plan(LAYERS, "quick", jitter="10%")
    assert found.cut is not None
    assert found.cut.gap == pytest.approx(found.objective / found.cut.lower_bound - 1, abs=1e-9)
    zbv.check(plan_json(found), LAYERS)


def test_a_cancelled_search_returns_the_plan_at_once(planned: Plan) -> None:
    found = zbv.plan(PROBLEM, "quick", jitter=JITTER, start_from=planned, cancelled=lambda: True)
    assert found.plan_id == planned.plan_id
    assert found.simulation is None
    assert found.provenance.extra["cut"] == "cancelled"


def test_a_time_limit_ends_the_choice() -> None:
    found = zbv.plan(PROBLEM, "thorough", time_limit=0.3, jitter=JITTER)
    assert found.provenance.extra["cut"] == "time limit"
    zbv.check(plan_json(found), PROBLEM)


@pytest.mark.parametrize(
    ("jitter", "quantile", "pointer"),
    [
        (None, 0.95, "/quantile"),
        (JITTER, 0.49, "/quantile"),
        (JITTER, 0.995, "/quantile"),
        (JITTER, float("nan"), "/quantile"),
    ],
)
def test_wrong_options_are_refused(jitter: Jitter | None, quantile: float, pointer: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        zbv.plan(PROBLEM, "quick", jitter=jitter, quantile=quantile)
    assert caught.value.issues[0].pointer == pointer


@pytest.mark.parametrize("problem", [PROBLEM, LAYERS])
def test_jitter_of_other_ranks_is_refused(problem: Problem | LayeredProblem) -> None:
    jitter = replace(JITTER, rank=JITTER.rank * 5)
    with pytest.raises(InvalidInput, match="one per rank") as caught:
        zbv.plan(problem, "quick", jitter=jitter)
    assert caught.value.issues[0].pointer == "/jitter/rank"
