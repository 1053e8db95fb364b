"""Durations that vary: simulations of a plan, and searches that choose by simulation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zbv_solver as zbv
from support.problems import uniform
from zbv_solver.errors import InvalidInput, InvalidPlan
from zbv_solver.plans.plan import Plan, plan_json, simulation_json
from zbv_solver.plans.reading import parse_plan
from zbv_solver.problem.jitter import Jitter
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.problem import Problem, Times
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


@pytest.fixture(scope="module")
def plan() -> Plan:
    return zbv.plan(uniform(4, 8, limit=8, p2p=0.25), "quick")


@pytest.fixture(scope="module")
def document(plan: Plan) -> dict[str, Any]:
    return plan_json(replace(plan, simulation=zbv.simulate(plan, "action=5%,transfer=20%", scenarios=64)))


def test_a_plan_and_all_baselines_are_simulated(plan: Plan) -> None:
    found = zbv.simulate(plan, zbv.Jitter.of(action=0.05, transfer=0.2), scenarios=64)
    assert [(each.name, each.fits) for each in found.baselines] == [
        (each.name, each.fits) for each in plan.baselines
    ]
    everything: list[Times] = [plan.metrics, *plan.baselines]
    for spans, metrics in zip(
        [found.spans, *(each.spans for each in found.baselines)], everything, strict=True
    ):
        # The expectation of a maximum is at least the maximum of the means, up to the error of a sample.
        assert 0.99 * metrics.span < spans.expected_span < spans.p95_span < 1.2 * metrics.span
        assert 0.99 * metrics.makespan < spans.expected_makespan < spans.p95_makespan < 1.2 * metrics.makespan


def test_without_jitter_everything_is_as_planned(plan: Plan) -> None:
    spans = zbv.simulate(plan, "0", scenarios=32).spans
    assert (spans.expected_span, spans.p95_span) == pytest.approx((plan.metrics.span,) * 2)


def test_a_seed_gives_the_same_simulation_and_another_one_a_similar_one(plan: Plan) -> None:
    first, again, other = (zbv.simulate(plan, "5%", seed=seed) for seed in (3, 3, 4))
    assert first == again != other
    assert other.spans.p95_span == pytest.approx(first.spans.p95_span, rel=0.01)


def test_a_document_keeps_its_simulation(document: dict[str, Any]) -> None:
    found = parse_plan(document).simulation
    assert found is not None
    assert simulation_json(found) == document["simulation"]


def test_a_stated_simulation_is_repeated(document: dict[str, Any]) -> None:
    (claim,) = [claim for claim in zbv.check(document).claims if claim.pointer == "/simulation"]
    assert claim.is_verified
    better = {**document, "simulation": {**document["simulation"], "p95_span": 1.0}}
    with pytest.raises(InvalidPlan, match="p95_span of the plan in the simulation"):
        zbv.check(better)


def test_a_stated_simulation_of_an_unknown_baseline_is_refused(document: dict[str, Any]) -> None:
    simulation = document["simulation"]
    row = {**simulation["baselines"][0], "name": "magic"}
    with pytest.raises(InvalidPlan, match="zbv knows none of this name"):
        zbv.check({**document, "simulation": {**simulation, "baselines": [row]}})


def test_errors_point_into_the_simulation(document: dict[str, Any]) -> None:
    wrong = {**document["simulation"], "jitter": {"rank": [0, 0]}}
    with pytest.raises(InvalidInput, match="/simulation/rank: found 2 values"):
        zbv.check({**document, "simulation": wrong})


def test_a_simulation_that_would_take_too_long_is_not_repeated(document: dict[str, Any]) -> None:
    large = {**document["simulation"], "scenarios": 10**7}
    (claim,) = [
        claim
        for claim in zbv.check({**document, "simulation": large}).claims
        if claim.pointer == "/simulation"
    ]
    assert not claim.is_verified
