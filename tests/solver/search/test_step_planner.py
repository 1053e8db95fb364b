"""Planning step after step: verified plans, what is remembered, and wrong input."""

from __future__ import annotations

import json
from random import Random

import numpy as np
import pytest
import zbv_solver as zbv
from zbv_solver.construct.dispatch import serial
from zbv_solver.errors import InfeasibleMemory, InvalidInput
from zbv_solver.plans.plan import plan_json
from zbv_solver.search.step_planner import REMEMBERED, StepPlanner, stretched

Lengths = dict[str, list[int]]
SECONDS = 0.02
COSTS = ("forward", "backward_input", "backward_weight")


def planner(p: int = 3, m: int = 12, limit: float | None = 60.0) -> StepPlanner:
    """A planner for steps of ``m`` microbatches of at most 20 tokens."""
    costs = {"fixed": 1, "tokens": 1, "tokens_squared": 0.05}
    document = {
        "pp_degree": p,
        "microbatches": m,
        "sequences": [[10]] * m,
        "costs": dict.fromkeys(COSTS, costs) | {"p2p": 0.5},
        "memory": {
            "forward": {"tokens": 1},
            "backward_input": {"tokens": -0.5},
            "backward_weight": {"tokens": -0.5},
            "limit": limit,
        },
    }
    problem = zbv.parse(document)
    assert isinstance(problem, zbv.Problem)
    return zbv.StepPlanner(problem)


def batch(seed: int, m: int = 12) -> Lengths:
    """Microbatches of one sequence each."""
    random = Random(seed)
    tokens = [random.randint(1, 20) for _ in range(m)]
    return {"tokens": tokens, "tokens_squared": [each**2 for each in tokens]}


@pytest.mark.parametrize("seconds", [0.0, SECONDS])
@pytest.mark.parametrize("limit", [40.0, 60.0, None])
def test_every_step_has_a_verified_plan_for_its_batch(limit: float | None, seconds: float) -> None:
    steps = planner(limit=limit)
    for seed in range(4):
        values = batch(seed)
        plan = steps.plan(values, seconds=seconds)
        assert {each.name: [*each.value] for each in plan.problem.features} == values
        checked = zbv.check(json.loads(json.dumps(plan_json(plan))))  # raises for a false claim
        assert {claim.pointer for claim in checked.verified} >= {"/plan_id", "/metrics/span"}
        assert plan.metrics.lower_bound <= plan.metrics.span * (1 + 1e-9)


def test_the_first_plan_is_better_than_one_microbatch_after_another() -> None:
    steps = planner()
    for seed in range(4):
        plan = steps.first(batch(seed))
        assert plan.metrics.span < 0.8 * serial(plan.problem).span


def test_a_batch_in_another_order_has_the_same_plan_at_once() -> None:
    steps, values = planner(), batch(1)
    before = steps.plan(values, seconds=SECONDS)
    order = Random(2).sample(range(12), 12)
    after = steps.first({name: [each[at] for at in order] for name, each in values.items()})
    assert after.provenance.method == "step(cached)"
    assert after.metrics.span == pytest.approx(before.metrics.span, rel=1e-12)
    assert [after.problem.features[0].value[at] for at in after.orders.microbatch] == [
        before.problem.features[0].value[at] for at in before.orders.microbatch
    ]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zbv_solver.search.step_planner.CACHED", 5)
    steps = planner(p=2, limit=None)
    for seed in range(40):
        steps.plan(batch(seed), seconds=2e-3)
    assert len(steps._plans) == 5
    assert len(steps._known) <= REMEMBERED
    assert steps.first(batch(39)).provenance.method == "step(cached)"
    assert steps.first(batch(0)).provenance.method != "step(cached)"


def test_a_rule_is_remembered_once() -> None:
    steps = planner()
    for _ in range(20):
        steps.first(batch(3))
    assert len(steps._known) == 1


def test_rules_of_earlier_steps_make_first_plans_better() -> None:
    learned = planner(p=4, m=16, limit=40.0)
    for seed in range(8):
        learned.plan(batch(seed, 16), seconds=0.1)
    ratios = []
    for seed in range(100, 120):
        values = batch(seed, 16)
        fresh = planner(p=4, m=16, limit=40.0)
        ratios.append(learned.first(values).metrics.span / fresh.first(values).metrics.span)
    # General rules are tried, too, so what was learned can only help.
    assert max(ratios) <= 1.01
    assert np.exp(np.mean(np.log(ratios))) < 0.999


def test_the_number_of_microbatches_may_change() -> None:
    steps = planner()
    for m in (12, 7, 1, 30, 12):
        plan = steps.plan(batch(m, m), seconds=SECONDS)
        assert plan.problem.microbatches == m
        assert steps.first(batch(m + 1, m)).problem.microbatches == m


def test_a_pattern_keeps_its_form_with_another_number_of_microbatches() -> None:
    mountain = np.array([0, 2, 4, 6, 7, 5, 3, 1])
    longer = stretched(mountain, 16)
    assert sorted(longer) == [*range(16)]
    assert max(longer[[0, 15]]) <= 2
    assert 6 <= int(longer.argmax()) <= 9
    assert stretched(longer, 8).tolist() == mountain.tolist()


def test_a_microbatch_that_does_not_fit_is_refused() -> None:
    steps = planner(limit=40.0)
    values = batch(1)
    values["tokens"][3] = 30  # two stages hold 60
    with pytest.raises(InfeasibleMemory, match="40 < 60"):
        steps.plan(values)
    assert steps.first(batch(1)).metrics.span > 0


@pytest.mark.parametrize(
    "values",
    [
        {"tokens": [1, 2]},
        {"tokens": [1, 2], "tokens_squared": [1]},
        {"tokens": [], "tokens_squared": []},
        {"tokens": [-1], "tokens_squared": [1]},
        {"tokens": [float("nan")], "tokens_squared": [1]},
        {"token": [1], "tokens_squared": [1]},
        {},
    ],
)
def test_wrong_values_are_refused(values: Lengths) -> None:
    with pytest.raises(InvalidInput, match="found"):
        planner().first(values)


def test_a_problem_without_features_is_refused() -> None:
    problem = zbv.parse({"pp_degree": 2, "microbatches": 4, "costs": dict.fromkeys(COSTS, 1)})
    assert isinstance(problem, zbv.Problem)
    with pytest.raises(InvalidInput, match="/features"):
        zbv.StepPlanner(problem)
