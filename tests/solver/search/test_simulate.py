"""Simulations of plans: what they contain, and that they are checked like every other claim."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import zbv_solver as zbv
from support.problems import uniform
from zbv_solver.errors import InvalidInput, InvalidPlan
from zbv_solver.plans.plan import Plan, plan_json
from zbv_solver.plans.reading import parse_plan
from zbv_solver.plans.simulation import simulation_json
from zbv_solver.problem.problem import Times


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
