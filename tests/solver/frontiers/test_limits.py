"""The frontier: what fits counts for every larger limit, and a bound for every smaller one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.problems import uniform
from zbv_solver.frontiers.limits import LARGEST, Known, best_within, fits, grid, staircase, tightened

known = st.lists(
    st.builds(Known, st.just("plan"), st.integers(1, 8).map(float), st.integers(1, 20).map(float)), max_size=8
)


def test_the_grid_begins_at_the_smallest_limit_and_ends_at_twice_1f1bs() -> None:
    assert grid(uniform(4, 16))[:2] == (0.25, 0.375)
    assert grid(uniform(16, 32))[:3] == (0.0625, 0.125, 0.25)
    assert grid(uniform(4, 16))[-1] == LARGEST
    found = grid(uniform(3, 7))
    assert list(found) == sorted(set(found))


def test_where_even_twice_1f1bs_memory_is_too_little_only_the_smallest_is_left() -> None:
    assert grid(uniform(1, 1)) == (1.0, 1.25, 1.5, 2.0)


@given(known, st.integers(0, 9).map(float))
def test_the_best_within_a_limit_is_the_least_of_all_that_fits(plans: list[Known], fraction: float) -> None:
    best = best_within(fraction, plans)
    fitting = [plan for plan in plans if plan.needs <= fraction]
    assert (best is None) == (not fitting)
    if best is not None:
        assert best in fitting
        assert best.value == min(plan.value for plan in fitting)


@given(known)
def test_the_staircase_says_the_same_at_every_limit_and_no_more(plans: list[Known]) -> None:
    corners = staircase(plans)
    for fraction in range(10):
        best, corner = best_within(fraction, plans), best_within(fraction, corners)
        assert (best is None) == (corner is None)
        assert best is None or corner is None or best.value == corner.value
    needs, values = [each.needs for each in corners], [each.value for each in corners]
    assert needs == sorted(set(needs))
    assert values == sorted(set(values), reverse=True)


@given(st.lists(st.integers(0, 50).map(float), max_size=8))
def test_a_bound_is_raised_to_those_of_larger_limits(bounds: list[float]) -> None:
    assert list(tightened(bounds)) == [max(bounds[at:]) for at in range(len(bounds))]


def test_of_equally_good_plans_the_one_that_needs_least_is_named() -> None:
    plans = [Known("much", 1.5, 10.0), Known("little", 0.5, 10.0), Known("some", 1.0, 10.0)]
    best = best_within(2.0, plans)
    assert best is not None
    assert best.name == "little"


def test_rounding_keeps_nothing_out() -> None:
    assert fits(0.1 + 0.2, 0.3)
    assert not fits(0.3001, 0.3)
