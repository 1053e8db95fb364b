"""The race of two chains: which one wins, when each one ends, and how they divide the time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from support.problems import uniform
from zbv_solver.construct.dispatch import serial
from zbv_solver.search.incumbent import Incumbent, Solution
from zbv_solver.search.race import Halt, race

PROBLEM = uniform(2, 2)


def incumbent() -> Incumbent:
    return Incumbent(PROBLEM, 1.0, None)


@pytest.mark.parametrize(
    ("meets", "winner", "made"),
    [((5, 2), 1, (6, 3)), ((2, 5), 0, (3, 3)), ((2, 2), 0, (3, 3)), ((None, 2), 1, (9, 3))],
)
def test_the_chain_that_meets_the_bound_in_fewer_steps_wins_and_the_other_ends(
    meets: tuple[int | None, int], winner: int, made: tuple[int, int]
) -> None:
    """On one thread the first chain runs before the second; the steps alone decide."""
    orders = serial(PROBLEM).orders
    steps = [0, 0]

    def chain(number: int, halt: Halt) -> Iterator[Solution | None]:
        for step in range(9):
            steps[number] += 1
            yield Solution(100.0, orders, f"chain {number}") if step == meets[number] else None

    best = incumbent()
    best.bound = 100.0
    race(chain, best, Halt(None, None))
    assert best.current is not None
    assert best.current.method == f"chain {winner}"
    assert tuple(steps) == made


def test_one_worker_divides_a_time_limit_between_the_chains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("zbv_solver.search.race.time", clock)
    steps = [0, 0]

    def chain(number: int, halt: Halt) -> Iterator[Solution | None]:
        nonlocal now
        while True:
            now += 1.0  # every step takes a second
            steps[number] += 1
            yield None

    race(chain, incumbent(), Halt(None, None), seconds=800)
    assert sum(steps) == pytest.approx(800, abs=4)
    assert steps[0] == pytest.approx(steps[1], abs=4)


def test_the_second_chain_may_use_the_time_that_the_first_one_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("zbv_solver.search.race.time", clock)
    steps = [0, 0]

    def chain(number: int, halt: Halt) -> Iterator[Solution | None]:
        nonlocal now
        while number == 1 or steps[0] < 10:
            now += 1.0
            steps[number] += 1
            yield None

    race(chain, incumbent(), Halt(None, None), seconds=800)
    assert steps[0] == 10
    assert steps[1] == pytest.approx(790, abs=4)


def test_the_end_of_its_time_stops_the_kernels_of_a_chain() -> None:
    """Rounds of annealing are long: only the flag that kernels poll ends one early."""
    stopped: list[int] = []

    def chain(number: int, halt: Halt) -> Iterator[Solution | None]:
        while not halt.flag[0]:
            time.sleep(0.001)
        stopped.append(number)
        yield None

    race(chain, incumbent(), Halt(None, None), seconds=0.08)
    assert stopped == [0, 1]
