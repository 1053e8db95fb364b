"""Durations that vary: simulations of a plan, and searches that choose by simulation."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zbv_solver as zbv
from support.cuts import layered
from support.problems import uniform, with_sizes
from zbv_solver.plans.plan import Plan, plan_json
from zbv_solver.plans.reading import parse_plan
from zbv_solver.problem.cut import Link
from zbv_solver.problem.problem import Times
from zbv_solver.problem.stages import Copies
from zbv_solver.search import jitter as jitter_search
from zbv_solver.search.options import SearchOptions
from zbv_solver.timing.step_times import iteration_times
from zbv_solver.verify.verifier import verify

JITTER = zbv.Jitter.of(action=0.1, transfer=0.3)
PROBLEM = uniform(4, 8, limit=8, p2p=1)
BLOCK = {"name": "block", "forward": 1, "backward_input": 1, "backward_weight": 1, "repeat": 6}
LAYERS = zbv.parse({"pp_degree": 2, "microbatches": 3, "layers": [BLOCK]})


@pytest.fixture(scope="module")
def planned() -> Plan:
    return zbv.plan(PROBLEM, "quick")


def test_the_plan_states_how_it_was_chosen_and_is_better_when_durations_vary(planned: Plan) -> None:
    chosen = zbv.plan(PROBLEM, "quick", jitter=JITTER, quantile=0.95)
    extra = chosen.provenance.extra
    assert (extra["jitter"], extra["quantile"]) == ({"action": 0.1, "rank": 0, "transfer": 0.3}, 0.95)
    assert chosen.simulation == zbv.simulate(chosen, JITTER)
    assert chosen.metrics.lower_bound == planned.metrics.lower_bound
    assert chosen.metrics.gap == pytest.approx(chosen.objective / chosen.metrics.lower_bound - 1)
    zbv.check(plan_json(chosen), PROBLEM)
    before, after = (
        np.quantile(iteration_times(PROBLEM, plan.orders, JITTER, scenarios=2000, seed=5).span, 0.95)
        for plan in (planned, chosen)
    )
    assert after < before
    threads = zbv.plan(PROBLEM, "quick", jitter=JITTER, quantile=0.95, workers=2)
    assert (threads.plan_id, threads.simulation) == (chosen.plan_id, chosen.simulation)


def test_layers_keep_their_cut_and_microbatches_that_differ_have_longer_latencies_too() -> None:
    plan: Any = zbv.plan(LAYERS, "quick", jitter="10%")
    assert plan.cut.gap == pytest.approx(plan.objective / plan.cut.lower_bound - 1, abs=1e-9)
    zbv.check(plan_json(plan), LAYERS)
    problem = with_sizes(uniform(2, 3, limit=30.0), [0.0, 4.0, 0.0])
    options = SearchOptions("standard", without=("tune", "inject"))
    plan = jitter_search.search_for_jitter(problem, options, jitter=zbv.Jitter.of(action=0.05))
    verify(plan)
    assert plan.simulation is not None


def test_a_simulation_ends_early_or_is_left_out(planned: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large one would take minutes."""
    checks = [None, None]
    with pytest.raises(IndexError):
        jitter_search.simulate(planned, JITTER, check=checks.pop)
    cancelled = zbv.plan(PROBLEM, "quick", jitter=JITTER, start_from=planned, cancelled=lambda: True)
    monkeypatch.setattr(jitter_search, "SIMULATING_SECONDS", -math.inf)
    for plan in (cancelled, zbv.plan(PROBLEM, "quick", time_limit=600, jitter=JITTER)):
        assert (plan.plan_id, plan.simulation) == (planned.plan_id, None)


def test_a_plan_and_all_baselines_are_simulated(planned: Plan) -> None:
    simulation = zbv.simulate(planned, zbv.Jitter.of(action=0.05, transfer=0.2), scenarios=64)
    rows = [(row.name, row.fits) for row in simulation.baselines]
    assert rows == [(row.name, row.fits) for row in planned.baselines]
    spans = [simulation.spans, *(row.spans for row in simulation.baselines)]
    metrics: list[Times] = [planned.metrics, *planned.baselines]
    for simulated, times in zip(spans, metrics, strict=True):
        # The expectation of a maximum is at least the maximum of the means, up to the error of a sample.
        assert 0.99 * times.span < simulated.expected_span < simulated.p95_span < 1.2 * times.span
        longer = simulated.expected_makespan, simulated.p95_makespan
        assert 0.99 * times.makespan < longer[0] < longer[1] < 1.2 * times.makespan
    still: Any = zbv.plan(PROBLEM, "quick", jitter="0")
    assert still.plan_id == planned.plan_id
    assert still.simulation.spans.p95_span == pytest.approx(planned.metrics.span)
    first, again, other = (zbv.simulate(planned, "5%", seed=seed) for seed in (3, 3, 4))
    assert first == again != other
    assert other.spans.p95_span == pytest.approx(first.spans.p95_span, rel=0.01)


def test_a_stated_simulation_is_kept_and_repeated(planned: Plan) -> None:
    simulation = zbv.simulate(planned, "action=5%,transfer=20%", scenarios=64)
    document = plan_json(replace(planned, simulation=simulation))
    assert plan_json(parse_plan(document))["simulation"] == document["simulation"]

    def is_verified(**changes: Any) -> bool:
        claims = zbv.check({**document, "simulation": {**document["simulation"], **changes}}).claims
        return next(claim.is_verified for claim in claims if claim.pointer == "/simulation")

    assert is_verified()
    assert not is_verified(scenarios=10**7)
    unknown = {**document["simulation"]["baselines"][0], "name": "magic"}
    wrong: dict[str, dict[str, Any]] = {
        "p95_span of the plan in the simulation": {"p95_span": 1.0},
        "zbv knows none of this name": {"baselines": [unknown]},
        "/simulation/rank: found 2 values": {"jitter": {"rank": [0, 0]}},
    }
    for says, changes in wrong.items():
        with pytest.raises((zbv.InvalidPlan, zbv.InvalidInput), match=says):
            is_verified(**changes)


def test_copies_to_the_host_are_not_simulated() -> None:
    stages = uniform(2, 4, limit=3)
    copied = replace(stages, copies=Copies((1.0,) * 4, (1.0,) * 4, stages.memory.forward))
    layers = replace(layered(memory={"limit": 30}), host=Link(1.0, 1.0))
    for problem, pointer in ((copied, "/costs/offload"), (layers, "/costs/host_link")):
        with pytest.raises(zbv.InvalidInput, match="are not simulated") as error:
            zbv.plan(problem, jitter=zbv.Jitter.of(action=0.1))
        assert error.value.issues[0].pointer == pointer
