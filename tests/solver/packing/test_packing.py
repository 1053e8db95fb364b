"""Packings: documents in and out, plans of all replicas, and bounds."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zbv_solver as zbv
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import batch_document
from support.orders import random_orders
from zbv_solver.packing.batch import parse_batch
from zbv_solver.packing.packing import pack, packing_json
from zbv_solver.packing.step_costs import StepCosts
from zbv_solver.search.options import SearchOptions
from zbv_solver.timing.start_times import evaluate

QUICK = SearchOptions("quick")


def by_estimate(problem: Any, options: SearchOptions) -> Any:
    """A planner that answers with the estimate, so that packings can be tested without searches."""
    tokens, squares = (feature.value for feature in problem.features)
    return SimpleNamespace(
        objective=1e3 * (sum(tokens) + sum(squares)), problem=problem, effort=options.effort
    )


def test_a_batch_is_packed_planned_and_written() -> None:
    batch = zbv.parse_batch(batch_document([8] * 12, max_tokens=8, replicas=3))
    found = zbv.pack(batch, compare=True)
    assert [len(each.microbatches) for each in found.replicas] == [4, 4, 4]
    assert found.lower_bound <= found.step_time == max(each.plan.objective for each in found.replicas)
    assert found.gap == 0
    document = json.loads(json.dumps(packing_json(found)))
    assert document["step_time"] == pytest.approx(found.step_time)
    (usual,) = document["baselines"]
    assert usual["name"] == "equal-tokens"
    assert usual["step_time"] >= found.step_time * (1 - 1e-9)
    for replica in document["replicas"]:
        assert sorted(replica["entry_order"]) == list(range(len(replica["microbatches"])))
        assert replica["sequences"] == [[8]] * 4
        assert zbv.check(replica["plan"]).problem.microbatches == 4


def test_problems_of_replicas_have_the_features_of_their_microbatches() -> None:
    batch = parse_batch(batch_document([30, 40, 30, 20, 4, 60]))
    found = pack(batch, QUICK, planner=by_estimate)
    for replica in found.replicas:
        lengths = [[batch.sequences[index] for index in own] for own in replica.microbatches]
        tokens, squares = (feature.value for feature in replica.plan.problem.features)
        assert list(tokens) == [sum(own) for own in lengths]
        assert list(squares) == [sum(length**2 for length in own) for own in lengths]


def test_replicas_are_balanced_again_by_their_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the plans of one replica take longer than estimated, it must get less work."""

    def planner(problem: Any, options: SearchOptions) -> Any:
        plan = by_estimate(problem, options)
        has_the_longest = any(tokens % 3 for tokens in problem.features[0].value)
        plan.objective *= 2 if has_the_longest and options.effort == "standard" else 1
        return plan

    def step_time() -> float:
        batch = parse_batch(batch_document([4] + [3] * 59, limit=None))
        return pack(batch, SearchOptions("standard"), planner=planner).step_time

    balanced = step_time()
    monkeypatch.setattr("zbv_solver.packing.packing.ROUNDS", 0)
    assert balanced < 0.9 * step_time()


@pytest.mark.parametrize("cost", [0, 1])
def test_batches_without_costs_of_tokens_give_every_replica_work(cost: float) -> None:
    costs = {"forward": cost, "backward_input": cost, "backward_weight": cost}
    document = batch_document([5, 1, 7, 2, 2], replicas=3) | {"problem": {"pp_degree": 2, "costs": costs}}
    found = pack(parse_batch(document), QUICK)
    assert all(each.microbatches for each in found.replicas)
    assert (found.step_time > 0) == (cost > 0)


def test_the_same_seed_packs_the_same() -> None:
    batch = parse_batch(batch_document(list(range(1, 41)), replicas=3))
    first, second = (pack(batch, QUICK, planner=by_estimate) for _ in range(2))
    assert [each.microbatches for each in first.replicas] == [each.microbatches for each in second.replicas]


@settings(max_examples=15)
@given(st.lists(st.integers(1, 60), min_size=2, max_size=5), st.randoms(use_true_random=False))
def test_no_order_undercuts_the_estimate_of_its_replica(lengths: list[int], random: Any) -> None:
    """Any feasible order, in exactly the memory that it needs, takes at least the estimate."""
    batch = parse_batch(batch_document(lengths, replicas=1, limit=None))
    microbatches = [[index] for index in range(len(lengths))]
    random.shuffle(microbatches)
    unlimited = batch.problem_of(microbatches)
    orders = random_orders(unlimited, random)
    timing = evaluate(unlimited, orders)
    limited = replace(StepCosts.of(batch.problem), limit=np.array(timing.peak_memory))
    moments = np.array([limited.moments([lengths[index] for index in own]) for own in microbatches])
    assert limited.step(moments) <= timing.span * (1 + 1e-9)


FALLING = batch_document([8, 8], forward={"fixed": 100, "tokens": -1})["problem"]


@pytest.mark.parametrize(
    ("changes", "pointer", "message"),
    [
        ({"sequences": [8, 65]}, "/sequences/1", "found 65 tokens, more than the largest microbatch"),
        ({"sequences": []}, "/sequences", "at least 1 item"),
        ({"sequences": [0, 4]}, "/sequences/0", "greater than or equal to 1"),
        ({"sequences": [4.5, 4]}, "/sequences/0", "valid integer"),
        ({"replicas": 9}, "/replicas", "found 9 replicas for 2 sequences"),
        ({"max_tokens": 0}, "/max_tokens", "greater than or equal to 1"),
        ({"problem": {"microbatches": 4}}, "/problem/microbatches", "a packing chooses this"),
        ({"problem": {"sequences": [[4]]}}, "/problem/sequences", "a packing chooses this"),
        ({"problem": {"layers": []}}, "/problem/layers", "Cut the layers first"),
        ({"problem": {"pp_degree": 0}}, "/problem/pp_degree", "found 0"),
        ({"problem": {"costs": {"forward": {"pixels": 1}}}}, "/problem/costs/backward_input", "required"),
        ({"problem": FALLING}, "/problem/costs/forward/tokens", "must not be negative"),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], pointer: str, message: str) -> None:
    document = batch_document([8, 8])
    problem = document["problem"] | changes.get("problem", {})
    with pytest.raises(zbv.InvalidInput) as caught:
        parse_batch({**document, **changes, "problem": problem})
    assert message in next(each.detail for each in caught.value.issues if each.pointer == pointer)


def test_a_sequence_that_fits_no_memory_is_refused() -> None:
    with pytest.raises(zbv.InfeasibleMemory):
        parse_batch(batch_document([64, 8], limit=200))
