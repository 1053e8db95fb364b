"""Distributions of lengths and the problems made of them."""

from __future__ import annotations

import hashlib
import json

import pytest
from zbv_models.estimate.config import estimate_layers
from zbv_solver.construct.baselines import baseline, without_limit
from zbv_solver.packing.batch import parse_batch
from zbv_solver.problem.reading import parse_problem
from zbv_solver.timing.start_times import evaluate

from benchmarks.planner import lengths
from benchmarks.planner.lengths import LAWS, LONGEST, costs_and_memory, instances, packing_instances


def test_the_same_seed_draws_the_same_lengths_everywhere() -> None:
    drawn = {each.name: each.lengths(1000, "0") for each in LAWS.values()}
    digest = hashlib.sha256(json.dumps(drawn, sort_keys=True).encode()).hexdigest()
    assert digest[:16] == "48e0d0f33555f9a1"
    assert all(1 <= length <= LONGEST for row in drawn.values() for length in row)


def test_distributions_have_the_stated_shape() -> None:
    web, bimodal, tail = (sorted(each.lengths(10_000, "1")) for each in LAWS.values())
    assert web[5000] == pytest.approx(600, rel=0.05)
    assert tail.count(LONGEST) / len(tail) == pytest.approx(0.025, rel=0.15)
    assert sum(1500 < length < 2500 for length in bimodal) < sum(length < 1500 for length in bimodal) / 5


def test_there_are_120_planning_instances_and_limits_are_shares_of_1f1b() -> None:
    every = instances()
    assert len({each.name for each in every}) == 120
    assert {(each.pp_degree, each.microbatches) for each in every} >= {(4, 16), (16, 64)}
    for each in every[:9]:
        problem = parse_problem(each.document())
        assert problem.memory.limit is not None
        of, orders = baseline("1f1b", problem)
        peak = max(evaluate(without_limit(of), orders).peak_memory)
        assert problem.memory.limit[0] == pytest.approx(max(each.share * peak, *problem.smallest_limit))
    for each in every[60:69]:
        document = each.document()
        longest = max(document["sequences"], key=sum)
        of, orders = baseline("1f1b", parse_problem({**document, "sequences": [longest] * each.microbatches}))
        peak = max(evaluate(without_limit(of), orders).peak_memory)
        assert document["memory"]["limit"] == pytest.approx(each.share * peak)


def test_costs_are_those_of_the_estimate_at_other_lengths() -> None:
    """The coefficients come from three lengths; a fourth must agree."""
    costs, memory = costs_and_memory(16)
    config = lengths._config(5120)
    block = estimate_layers(config)[1].plain
    forward = costs["forward"]
    assert forward["tokens"][1] * 5120 + forward["tokens_squared"][1] * 5120**2 == pytest.approx(
        block.times.forward, rel=1e-5
    )
    assert memory["forward"]["tokens"][1] * 5120 == block.after_forward


def test_batches_are_valid() -> None:
    for each in packing_instances():
        assert parse_batch(each.document()).replicas == 4
