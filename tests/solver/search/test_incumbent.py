"""What a search reports of its orders and bounds."""

from __future__ import annotations

from support.problems import uniform
from zbv_solver.construct.dispatch import serial
from zbv_solver.search.incumbent import Incumbent, Progress, Solution

PROBLEM = uniform(2, 2)


def test_weaker_bounds_are_ignored_and_not_reported() -> None:
    reports: list[Progress] = []
    incumbent = Incumbent(PROBLEM, 1.0, reports.append)
    attempt = serial(PROBLEM)
    incumbent.accept(Solution(attempt.value, attempt.orders, attempt.method))
    incumbent.raise_bound(3.0, "bounds")
    before = len(reports)
    for weaker in (3.0, 2.0, 0.0):
        incumbent.raise_bound(weaker, "cp-sat")
    assert (incumbent.bound, incumbent.source, len(reports)) == (3.0, "bounds", before)
    incumbent.raise_bound(4.0, "cp-sat")
    assert (incumbent.bound, incumbent.source, len(reports)) == (4.0, "cp-sat", before + 1)


def test_the_best_order_may_be_in_reserve() -> None:
    incumbent, orders = Incumbent(PROBLEM, 1.0, None), serial(PROBLEM).orders
    incumbent.accept(Solution(5.0, orders, "current"))
    for value, best in ((6.0, 5.0), (4.0, 4.0), (4.5, 4.0)):
        incumbent.put_aside(Solution(value, orders, "reserve"))
        assert incumbent.best is not None
        assert incumbent.best.value == best
    assert incumbent.current is not None
    assert incumbent.current.value == 5.0
    incumbent.bound = 4.0
    assert incumbent.is_optimal
