"""Packings: what every arrangement satisfies, optima of small batches, plans of all replicas, documents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zbv_solver as zbv
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import batch_document
from support.orders import random_orders
from zbv_solver.packing.arrange import Arrangement, Packer, arrangements, equal_tokens, improved
from zbv_solver.packing.packing import pack, packer_of, packing_json
from zbv_solver.packing.step_costs import StepCosts, packing_bound
from zbv_solver.search.options import SearchOptions
from zbv_solver.timing.start_times import evaluate

QUICK = SearchOptions("quick")
SMALL = [60, 9, 8, 7, 5], [33, 32, 20, 13, 12], [10, 10, 10, 10, 50], [64, 1, 1, 1], [2, 3, 1, 2, 1, 2, 3]
BATCHES = st.lists(st.integers(1, 64), min_size=3, max_size=24)


def packer(sequences: list[int], **options: Any) -> Packer:
    return packer_of(zbv.parse_batch(batch_document(sequences, **options)))


def bound_of(packer: Packer) -> float:
    return packing_bound(packer.costs, packer.lengths, packer.capacity, packer.replicas)


def step(costs: StepCosts, microbatches: list[list[int]]) -> float:
    """The estimate of a replica's step, from the lengths of every microbatch's sequences."""
    return costs.step(np.array([costs.moments(lengths) for lengths in microbatches]))


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """All ways to form microbatches."""
    if not items:
        yield []
        return
    first, *others = items
    for formed in partitions(others):
        yield [[first], *formed]
        for place in range(len(formed)):
            yield [*formed[:place], [first, *formed[place]], *formed[place + 1 :]]


def smallest_estimate(packer: Packer) -> float:
    """By trying all microbatches and all distributions."""
    best = float("inf")
    for made in partitions(list(range(len(packer.lengths)))):
        if all(map(packer.fits, made)):
            lengths = [[packer.lengths[index] for index in contents] for contents in made]
            for where in product(range(packer.replicas), repeat=len(made)):
                groups: list[list[list[int]]] = [[] for _ in range(packer.replicas)]
                for each, on in zip(lengths, where, strict=True):
                    groups[on].append(each)
                if all(groups):
                    best = min(best, max(step(packer.costs, group) for group in groups))
    return best


def by_estimate(problem: Any, options: SearchOptions) -> Any:
    """A planner that answers with an estimate, so that packings can be tested without searches."""
    tokens, squares = (feature.value for feature in problem.features)
    return SimpleNamespace(objective=1e3 * (sum(tokens) + sum(squares)), problem=problem)


@settings(max_examples=12)
@given(BATCHES, st.integers(1, 3), st.booleans(), st.sampled_from((0.001, 3.0, 1000.0)))
def test_every_sequence_is_packed_once_and_fits(batch: Any, replicas: int, tight: bool, scale: float) -> None:
    """The unit of time makes no difference."""
    sequences, most = batch, max(40, *batch) if tight else 64
    # A token of a microbatch that is alone holds 2 on each of a rank's two stages.
    options: Any = {"replicas": replicas, "limit": 4.0 * most if tight else None}
    made = packer(sequences, **options)
    found, usual = arrangements(made, seed=0), equal_tokens(made)
    for packing in (usual, *(each.contents for each in found)):
        contents = [*chain(*packing)]
        assert sorted(chain(*contents)) == list(range(len(sequences)))
        assert all(contents)
        assert (len(packing), all(packing)) == (replicas, True)
        assert all(sum(sequences[index] for index in indices) <= min(64, most) for indices in contents)
    start = Arrangement.of(made, usual)
    assert improved(start, seed=0).estimate <= start.estimate
    assert bound_of(made) <= found[0].estimate * (1 + 1e-9)
    scaled = arrangements(packer(sequences, scale=scale, **options), seed=0)
    assert scaled[0].estimate == pytest.approx(scale * found[0].estimate, rel=1e-6)


@pytest.mark.parametrize("limit", [None, 260.0])
@pytest.mark.parametrize("sequences", SMALL)
def test_small_batches_are_arranged_optimally(sequences: list[int], limit: float | None) -> None:
    made = packer(sequences, limit=limit)
    optimum = smallest_estimate(made)
    assert bound_of(made) <= optimum * (1 + 1e-9)
    assert arrangements(made, seed=0)[0].estimate == pytest.approx(optimum, rel=1e-9)


def test_large_microbatches_cost_more_where_memory_is_tight() -> None:
    roomy, tight = (packer([16] * 16, replicas=1, limit=limit, p2p=40).costs for limit in (None, 260.0))
    large, small = [[16] * 4] * 4, [[16]] * 16
    assert step(roomy, large) < step(roomy, small)
    assert step(tight, large) > step(tight, small)


@settings(max_examples=15)
@given(st.lists(st.integers(1, 60), min_size=2, max_size=5), st.randoms(use_true_random=False))
def test_no_order_undercuts_the_estimate_of_its_replica(lengths: list[int], random: Any) -> None:
    """Any feasible order, in exactly the memory that it needs, takes at least the estimate."""
    batch = zbv.parse_batch(batch_document(lengths, replicas=1, limit=None))
    unlimited = batch.problem_of([[index] for index in range(len(lengths))])
    timing = evaluate(unlimited, random_orders(unlimited, random))
    limited = replace(StepCosts.of(batch.problem), limit=np.array(timing.peak_memory))
    assert step(limited, [[length] for length in lengths]) <= timing.span * (1 + 1e-9)


def test_a_batch_is_packed_planned_and_written() -> None:
    found = zbv.pack(zbv.parse_batch(batch_document([8] * 12, max_tokens=8, replicas=3)), compare=True)
    assert found.lower_bound <= found.step_time == max(each.plan.objective for each in found.replicas)
    assert found.gap == 0
    document = json.loads(json.dumps(packing_json(found)))
    assert document["step_time"] == pytest.approx(found.step_time)
    usual = {row["name"]: row["step_time"] for row in document["baselines"]}
    assert usual["equal-tokens"] >= found.step_time * (1 - 1e-9)
    assert len(document["replicas"]) == 3
    for replica in document["replicas"]:
        assert sorted(replica["entry_order"]) == list(range(4))
        assert replica["sequences"] == [[8]] * 4
        assert zbv.check(replica["plan"]).problem.microbatches == 4


def test_problems_have_the_features_of_their_microbatches_and_a_seed_packs_the_same() -> None:
    batch = zbv.parse_batch(batch_document(list(range(1, 41)), replicas=3))
    found, same = (pack(batch, QUICK, planner=by_estimate) for _ in range(2))
    assert [each.microbatches for each in found.replicas] == [each.microbatches for each in same.replicas]
    for replica in found.replicas:
        lengths = [[batch.sequences[index] for index in own] for own in replica.microbatches]
        tokens, squares = (list(feature.value) for feature in replica.plan.problem.features)
        assert tokens == [sum(own) for own in lengths]
        assert squares == [sum(length**2 for length in own) for own in lengths]


def test_replicas_are_balanced_again_by_their_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the plans of one replica take longer than estimated, it must get less work."""

    def planner(problem: Any, options: SearchOptions) -> Any:
        plan = by_estimate(problem, options)
        has_the_longest = any(tokens % 3 for tokens in problem.features[0].value)
        plan.objective *= 2 if has_the_longest and options.effort == "standard" else 1
        return plan

    def step_time() -> float:
        batch = zbv.parse_batch(batch_document([4] + [3] * 59, limit=None))
        return pack(batch, SearchOptions("standard"), planner=planner).step_time

    balanced = step_time()
    monkeypatch.setattr("zbv_solver.packing.packing.ROUNDS", 0)
    assert balanced < 0.9 * step_time()


@pytest.mark.parametrize("cost", [0, 1])
def test_batches_without_costs_of_tokens_give_every_replica_work(cost: float) -> None:
    costs = {"forward": cost, "backward_input": cost, "backward_weight": cost}
    document = batch_document([5, 1, 7, 2, 2], replicas=3) | {"problem": {"pp_degree": 2, "costs": costs}}
    found = pack(zbv.parse_batch(document), QUICK)
    assert all(each.microbatches for each in found.replicas)
    assert (found.step_time > 0) == (cost > 0)


FALLING = batch_document([8], forward={"fixed": 100, "tokens": -1})["problem"]
PAIRED = {"costs": {**batch_document([8])["problem"]["costs"], "communication": {}}}


@pytest.mark.parametrize(("changes", "pointer", "message"), [
    ({"sequences": [8, 65]}, "/sequences/1", "found 65 tokens, more than the largest microbatch"),
    ({"sequences": []}, "/sequences", "at least 1 item"),
    ({"sequences": [0, 4]}, "/sequences/0", "greater than or equal to 1"),
    ({"sequences": [4.5, 4]}, "/sequences/0", "valid integer"),
    ({"replicas": 9}, "/replicas", "found 9 replicas for 2 sequences"),
    ({"max_tokens": 0}, "/max_tokens", "greater than or equal to 1"),
    ({"problem": {"microbatches": 4}}, "/problem/microbatches", "a packing chooses this"),
    ({"problem": {"layers": []}}, "/problem/layers", "Cut the layers first"),
    ({"problem": {"pp_degree": 0}}, "/problem/pp_degree", "found 0"),
    ({"problem": FALLING}, "/problem/costs/forward/tokens", "must not be negative"),
    ({"problem": {"costs": "x"}}, "/problem/costs", "must be a JSON object"),
    ({"problem": PAIRED}, "/problem/costs/communication", "remove the key"),
])  # fmt: skip
def test_mistakes_are_named(changes: dict[str, Any], pointer: str, message: str) -> None:
    document = batch_document([8, 8])
    problem = document["problem"] | changes.get("problem", {})
    with pytest.raises(zbv.InvalidInput) as caught:
        zbv.parse_batch({**document, **changes, "problem": problem})
    assert message in next(each.detail for each in caught.value.issues if each.pointer == pointer)
    with pytest.raises(zbv.InfeasibleMemory):
        zbv.parse_batch(batch_document([64, 8], limit=200))
