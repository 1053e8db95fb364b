"""Rounds of annealing: valid orders that never get worse, the same ones for the same seed."""

from __future__ import annotations

from itertools import pairwise

from support.problems import limited, uniform
from zbv_solver.construct.dispatch import priority_schedules
from zbv_solver.improve.annealing_rounds import LEVELS, THREE, anneal_in_rounds
from zbv_solver.plans.orders import Orders
from zbv_solver.timing.start_times import objective_of
from zbv_solver.verify.verifier import verify_orders

TIGHT = limited(uniform(4, 12, p2p=1, objective="makespan"), 2.0)


def rounds_of(seed: int) -> list[tuple[float, Orders]]:
    start = next(priority_schedules(TIGHT))
    rounds = 2 * THREE
    return list(
        anneal_in_rounds(TIGHT, start.orders, start.value, rounds=rounds, moves=300, factor=1.0, seed=seed)
    )


def test_every_round_gives_a_valid_order_that_is_not_worse() -> None:
    start = next(priority_schedules(TIGHT))
    found = rounds_of(0)
    assert len(found) == 2 * THREE
    for value, orders in found:
        verify_orders(TIGHT, orders)
        assert value == objective_of(TIGHT, orders)
    assert all(later <= earlier for (earlier, _), (later, _) in pairwise([(start.value, None), *found]))
    assert found[-1][0] < start.value


def test_the_seed_decides_the_orders() -> None:
    one, again, other = (rounds_of(seed) for seed in (0, 0, 100))
    assert one == again
    assert one != other


def test_levels_keep_fewer_orders_and_spend_all_moves() -> None:
    assert sum(level.share for level in LEVELS) == 1
    assert all(later.kept < earlier.kept for earlier, later in pairwise(LEVELS))
