"""Planning step after step: verified plans, what is remembered, and wrong input."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import numpy as np
import pytest
import zbv_solver as zbv
from support.problems import uniform
from zbv_solver.construct.dispatch import serial
from zbv_solver.plans.plan import plan_json
from zbv_solver.search.step_planner import REMEMBERED, StepPlanner, stretched

SECONDS = 0.02


def planner(p: int = 3, m: int = 12, limit: float | None = 60.0) -> StepPlanner:
    """A planner for steps of ``m`` microbatches of at most 20 tokens."""
    costs = {"fixed": 1, "tokens": 1, "tokens_squared": 0.05}
    half = {"tokens": -0.5}
    memory = {"forward": {"tokens": 1}, "backward_input": half, "backward_weight": half, "limit": limit}
    shares = dict.fromkeys(("forward", "backward_input", "backward_weight"), costs) | {"p2p": 0.5}
    return zbv.StepPlanner(uniform(p, m, sequences=[[10]] * m, costs=shares, memory=memory))


def batch(seed: int, m: int = 12) -> dict[str, list[int]]:
    """Microbatches of one sequence each."""
    tokens = [Random(seed + 100 * j).randint(1, 20) for j in range(m)]
    return {"tokens": tokens, "tokens_squared": [count**2 for count in tokens]}


@pytest.mark.parametrize("limit", [40.0, 60.0, None])
def test_every_step_has_a_verified_plan_for_its_batch(limit: float | None) -> None:
    """The first plan is better than one microbatch after another, and the number of them may change."""
    steps = planner(limit=limit)
    for seed, m in enumerate((12, 7, 1, 30, 12)):
        values = batch(seed, m)
        first, plan = steps.first(values), steps.plan(values, seconds=SECONDS)
        for made in (first, plan):
            assert {feature.name: [*feature.value] for feature in made.problem.features} == values
            checked = zbv.check(json.loads(json.dumps(plan_json(made))))  # raises for a false claim
            assert {claim.pointer for claim in checked.verified} >= {"/plan_id", "/metrics/span"}
        assert first.metrics.span < 0.8 * serial(first.problem).span or m == 1


def test_rules_of_earlier_steps_make_first_plans_better() -> None:
    learned = planner(p=4, m=16, limit=40.0)
    for seed in range(8):
        learned.plan(batch(seed, 16), seconds=0.1)
    ratios = []
    for values in (batch(seed, 16) for seed in range(100, 120)):
        fresh = planner(p=4, m=16, limit=40.0)
        ratios.append(learned.first(values).metrics.span / fresh.first(values).metrics.span)
    # General rules are tried, too, so what was learned can only help.
    assert max(ratios) <= 1.01
    assert np.exp(np.mean(np.log(ratios))) < 0.999


def test_a_pattern_keeps_its_form_with_another_number_of_microbatches() -> None:
    mountain = np.array([0, 2, 4, 6, 7, 5, 3, 1])
    longer = stretched(mountain, 16)
    assert sorted(longer) == [*range(16)]
    assert max(longer[[0, 15]]) <= 2
    assert 6 <= longer.argmax() <= 9
    assert stretched(longer, 8).tolist() == mountain.tolist()


def test_a_batch_in_another_order_has_the_same_plan_at_once() -> None:
    steps, values = planner(), batch(1)
    before = steps.plan(values, seconds=SECONDS)
    order = Random(2).sample(range(12), 12)
    after = steps.first({name: [row[at] for at in order] for name, row in values.items()})
    assert after.provenance.method == "step(cached)"
    assert after.metrics.span == pytest.approx(before.metrics.span, rel=1e-12)
    ran = [[plan.problem.features[0].value[at] for at in plan.orders.microbatch] for plan in (before, after)]
    assert ran[0] == ran[1]


def test_what_is_remembered_is_bounded_and_different(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zbv_solver.search.step_planner.CACHED", 5)
    steps = planner(p=2, limit=None)
    for seed in (*[3] * 20, *range(40)):
        steps.plan(batch(seed), seconds=2e-3)
    assert (len(steps._plans), len(steps._known) <= REMEMBERED) == (5, True)
    assert steps.first(batch(39)).provenance.method == "step(cached)"
    assert steps.first(batch(0)).provenance.method != "step(cached)"


def test_what_cannot_be_planned_is_refused() -> None:
    wrong: list[Any] = [{}, {"tokens": [1, 2]}, {"token": [1], "tokens_squared": [1]}]
    wrong += [{"tokens": of, "tokens_squared": [1] * (of != [])} for of in ([1, 2], [], [-1], [float("nan")])]
    for values in wrong:
        with pytest.raises(zbv.InvalidInput, match="found"):
            planner().first(values)
    steps, values = planner(limit=40.0), batch(1)
    values["tokens"][3] = 30  # two stages hold 60
    with pytest.raises(zbv.InfeasibleMemory, match="40 < 60"):
        steps.plan(values)
    assert steps.first(batch(1)).metrics.span > 0
    with pytest.raises(zbv.InvalidInput, match="/features"):
        zbv.StepPlanner(uniform(2, 4))
