"""Arrangements: what every one must satisfy, and exact optima of small batches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import batch_document
from zbv_solver.packing.arrange import Arrangement, Packer, arrangements, equal_tokens, improved
from zbv_solver.packing.batch import parse_batch
from zbv_solver.packing.packing import packer_of
from zbv_solver.packing.step_costs import StepCosts, packing_bound

BATCHES = st.tuples(st.lists(st.integers(1, 64), min_size=3, max_size=24), st.integers(1, 3), st.booleans())


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
    first, *rest = items
    for others in partitions(rest):
        yield [[first], *others]
        for place in range(len(others)):
            yield [*others[:place], [first, *others[place]], *others[place + 1 :]]


def smallest_estimate(packer: Packer) -> float:
    """By trying all microbatches and all distributions."""
    best = float("inf")
    for made in partitions(list(range(len(packer.lengths)))):
        if not all(packer.fits(contents) for contents in made):
            continue
        lengths = [[packer.lengths[index] for index in contents] for contents in made]
        for where in product(range(packer.replicas), repeat=len(made)):
            if len(set(where)) < packer.replicas:
                continue
            steps = [
                step(packer.costs, [own for own, on in zip(lengths, where, strict=True) if on == replica])
                for replica in range(packer.replicas)
            ]
            best = min(best, max(steps))
    return best


@settings(max_examples=12)
@given(BATCHES)
def test_every_sequence_is_packed_once_within_capacity_and_memory(
    drawn: tuple[list[int], int, bool],
) -> None:
    sequences, replicas, is_tight = drawn
    most = max(40, *sequences) if is_tight else 64
    # A token of a microbatch that is alone holds 2 on each of a rank's two stages.
    limit = 4.0 * most if is_tight else None
    packer = packer_of(parse_batch(batch_document(sequences, replicas=replicas, limit=limit)))
    found = arrangements(packer, seed=0)
    usual = equal_tokens(packer)
    for packing in (usual, *(each.contents for each in found)):
        assert sorted(index for replica in packing for own in replica for index in own) == list(
            range(len(sequences))
        )
        assert len(packing) == replicas
        assert all(packing)
        for contents in (own for replica in packing for own in replica):
            assert contents
            assert sum(sequences[index] for index in contents) <= min(64, most)
    start = Arrangement.of(packer, usual)
    assert improved(start, seed=0).estimate <= start.estimate
    assert bound_of(packer) <= found[0].estimate * (1 + 1e-9)


@settings(max_examples=5)
@given(BATCHES, st.sampled_from((0.001, 3.0, 1000.0)))
def test_arrangements_do_not_depend_on_the_unit_of_time(
    drawn: tuple[list[int], int, bool], scale: float
) -> None:
    sequences, replicas, _ = drawn
    one, other = (
        packer_of(parse_batch(batch_document(sequences, replicas=replicas, scale=each)))
        for each in (1.0, scale)
    )
    first, second = ([each.contents for each in arrangements(packer, seed=1)] for packer in (one, other))
    assert first == second


@pytest.mark.parametrize("limit", [None, 260.0])
@pytest.mark.parametrize(
    "sequences", [[60, 9, 8, 7, 5], [33, 32, 20, 13, 12], [10, 10, 10, 10, 50], [64, 1, 1, 1]]
)
def test_small_batches_are_arranged_optimally(sequences: list[int], limit: float | None) -> None:
    packer = packer_of(parse_batch(batch_document(sequences, limit=limit)))
    best = arrangements(packer, seed=0)[0].estimate
    optimum = smallest_estimate(packer)
    assert bound_of(packer) <= optimum * (1 + 1e-9)
    assert best == pytest.approx(optimum, rel=1e-9)


def test_large_microbatches_cost_more_where_memory_is_tight() -> None:
    roomy, tight = (
        packer_of(parse_batch(batch_document([16] * 16, replicas=1, limit=limit, p2p=40))).costs
        for limit in (None, 260.0)
    )
    large, small = [[16] * 4] * 4, [[16]] * 16
    assert step(roomy, large) < step(roomy, small)
    assert step(tight, large) > step(tight, small)
