"""What problems mean: costs and memory of stages, microbatches, cuts of layers, rounding and jitter."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import zbv_solver as zbv
from hypothesis import given
from hypothesis import strategies as st
from support import cuts
from support.changed import changed
from support.cuts import BLOCK, EMBEDDING, HEAD, RECOMPUTE, layered
from support.problems import DIFFERING, decades, differing_problems, problems, rough_problems, uniform
from support.reference import all_orders_of_one_microbatch, peak_memory
from zbv_solver.measure.refit import with_stage_costs
from zbv_solver.problem import numeric
from zbv_solver.problem.cut import Cut
from zbv_solver.problem.jitter import Jitter, Spread, draw
from zbv_solver.problem.layered_problem import LayeredProblem, uncut
from zbv_solver.problem.problem import B, F, I, Problem, W, require_same_problem
from zbv_solver.problem.reading import parse_problem
from zbv_solver.problem.stages import Costs, Memory, Placement
from zbv_solver.search.assemble import in_search_unit
from zbv_solver.verify.verifier import verify_orders


def test_a_cost_is_its_fixed_part_plus_coefficients_times_features() -> None:
    arrays = parse_problem(DIFFERING).arrays
    for microbatch, tokens in enumerate([4, 2, 1]):
        kind = arrays.kind_of[microbatch]
        forward, inputs = 20 - tokens + 0.5 * tokens**2, 3 * tokens
        assert arrays.duration[:, 0, kind].tolist() == [forward, inputs, 7, inputs + 7]
        assert arrays.duration[I, 7, kind] == 4 * tokens
        assert arrays.latency[:, kind].tolist() == [5 + tokens] * 3 + [0] + [5 + tokens] * 3
        assert arrays.delta[:, 0, kind].tolist() == [2 * tokens, -tokens, -tokens, -2 * tokens]
    # A sum that is zero up to rounding is zero.
    changes = {"features.tokens": [3, 2, 1], "costs.forward": {"fixed": 0.3, "tokens": -0.1}}
    arrays = parse_problem(changed(DIFFERING, changes)).arrays
    assert arrays.duration[F, 0, arrays.kind_of[0]] == 0


def test_microbatches_are_of_one_kind_if_they_cost_the_same() -> None:
    for tokens, kind_of in ([2, 2, 2], [0, 0, 0]), ([1, 2, 1], [0, 1, 0]), ([3, 2, 1], [2, 1, 0]):
        features = {"tokens": tokens, "tokens_squared": [k**2 for k in tokens], "unused": [1, 2, 3]}
        problem = parse_problem({**DIFFERING, "features": features})
        assert (problem.arrays.kind_of.tolist(), problem.is_equal) == (kind_of, max(kind_of) == 0)


@given(differing_problems() | rough_problems())
def test_every_microbatch_releases_what_it_holds_and_the_average_one_too(problem: Problem) -> None:
    delta, average = problem.arrays.delta, problem.averaged()
    assert (delta[F] + delta[I] + delta[W] == 0).all()
    assert (delta[F] + delta[B] == 0).all()
    assert average.is_equal
    for name in ("duration", "delta", "latency"):
        own, mean = getattr(problem.arrays, name), getattr(average.arrays, name)
        total = own @ problem.arrays.count
        assert mean[..., 0] * problem.microbatches == pytest.approx(total, rel=1e-8)


@given(problems(max_p=3, max_m=1))
def test_the_smallest_limit_is_the_lowest_peak_of_any_order(problem: Problem) -> None:
    """Exhaustively, for one microbatch: more of them can only add memory."""
    peaks = [peak_memory(problem, orders) for orders in all_orders_of_one_microbatch(problem)]
    assert np.min(peaks, axis=0) == pytest.approx(problem.smallest_limit)


def test_an_infeasible_limit_names_the_ranks_and_what_the_largest_microbatch_needs() -> None:
    with pytest.raises(zbv.InfeasibleMemory, match=r"rank 3: 17\.5 < 18") as caught:
        parse_problem(DIFFERING).require_feasible()
    assert list(caught.value.ranks) == [0, 3]
    assert list(caught.value.smallest) == [17, 17, 17, 18]


def test_problems_in_code_are_checked_like_documents_and_are_the_same_on_another_program() -> None:
    require_same_problem(uniform(2, 2), replace(uniform(2, 2), measured=(("device", "H200"),)))
    placement, ones = Placement.of("v", 2), (1.0,) * 4
    costs = Costs(ones, ones[:3], (1.0, -1.0, 1.0, 1.0), ones[:3])
    wrong = replace(placement, kind="w")  # type: ignore[arg-type]
    with pytest.raises(zbv.InvalidInput) as caught:
        Problem(wrong, 0, costs, Memory.unlimited(placement), "time")  # type: ignore[arg-type]
    assert {issue.pointer for issue in caught.value.issues} == {
        *("/placement", "/objective", "/microbatches"),
        *("/costs/backward_input", "/costs/backward_weight/1"),
    }


def test_a_cut_sums_the_layers_of_every_stage() -> None:
    """Recomputed layers have other costs; a rank holds the static memory and the largest workspace."""
    block = {**BLOCK, "recompute": {**RECOMPUTE, "forward": 3}, "output_bytes": 50}
    head = {**HEAD, "backward": 9, "memory": {"workspace": 1}, "parameters_bytes": 6}
    problem: Any = layered(
        layers=[EMBEDDING, block, head],
        costs={"link": {"latency": 2, "bandwidth": 25}},
        memory={"static": [10, 20]},
        cut={"allow_empty": True},
    ).cut_into(Placement.of("v", 2), Cut.at((0, 1, 5, 5, 10), (False, True, False, False)))
    assert problem.costs == Costs(
        forward=(1, 4 * 3, 0, 4 * 2 + 5),
        backward_input=(0, 4 * 4, 0, 4 * 2 + 5),
        backward_weight=(1, 4 * 1, 0, 4 * 1 + 5),
        backward=(1, 4 * 5, 0, 4 * 3 + 9),
        p2p=(2 + 100 / 25, 2 + 50 / 25, 2 + 50 / 25),
    )
    deltas = (0, 4 * 1, 0, 4 * 4), (0, 4 * 1, 0, -4 * 2), (0, -4 * 2, 0, -4 * 2)
    assert problem.memory == Memory(*deltas, static=(10 + 4 * 1 + 6 + 1, 20 + 4 + 2), limit=None)
    assert problem.model.partition[1:3] == (("block.0", "block.1", "block.2", "block.3"), ())


def test_a_stage_costs_what_its_layers_cost_on_the_device_of_its_rank_planned_or_measured() -> None:
    asked: Any = (layered(**cuts.MIXED), layered(**cuts.MIXED, placement="loop"))
    made, around = (of.cut_into(of.placements[0], Cut.at((0, 2, 3, 5, 6, 8, 10))) for of in asked)
    assert made.costs.forward == (3, 2, 12, 6, 4, 7)  # stages 2 and 3 are on rank 2
    assert made.costs.backward_input == (2, 2, 10, 5, 4, 7)
    assert made.costs.backward_weight == (2, 1, 2, 1, 2, 6)
    assert (made.memory.forward, made.memory.static) == ((4, 4, 6, 3, 8, 4), (2, 3, 3))
    assert made.arrays.latency[:, 0].tolist() == [2, 4, 0, 4, 2]
    assert (around.costs.p2p, around.costs.forward) == ((2, 4, 9, 2, 4), (3, 2, 12, 2, 4, 11))
    double = made.costs.mapped(lambda values: tuple(2 * value for value in values), made.costs.p2p)
    measured: Any = with_stage_costs(made, double)
    assert (measured.costs, measured.model.devices) == (double, ("fast", "fast", "slow"))
    block = measured.model.model.each[3]  # block.2, which is on the slow rank
    assert (block.on[0].costs.forward, block.costs.forward) == (12, 4)


def test_blocking_transfers_are_a_part_of_the_actions() -> None:
    cut = Placement.of("v", 2), Cut.at((0, 3, 5, 7, 10))
    costs = ({"p2p": 0.5, "blocking": is_blocking} for is_blocking in (True, False))
    one, other = (layered(costs=each).cut_into(*cut).costs for each in costs)
    assert np.subtract(one.forward, other.forward).tolist() == [0.5, 0, 0.5, 0]
    assert np.subtract(one.backward_input, other.backward_input).tolist() == [0, 0.5, 0, 0.5]
    assert (one.p2p, other.p2p) == ((0, 0, 0), (0.5, 0.5, 0.5))


OF_LAYERS = cuts.layered_problems(4, ("v", "loop", "single"))


@given(OF_LAYERS | cuts.layered_problems(4, ("v", "loop"), mixed=True), st.data())
def test_a_cut_knows_the_problem_that_it_is_a_cut_of(problem: LayeredProblem, data: st.DataObject) -> None:
    static = (1.5,) * problem.pp_degree
    problem = replace(
        problem, blocking=data.draw(st.booleans()), p2p=0.5 * (not problem.links), static=static
    )
    for cut in islice(cuts.every_cut(problem, problem.placements[0]), 3):
        before = uncut(cut)
        p2p = problem.p2p if cut.n_stages > 1 or cut.model.blocking else 0.0  # type: ignore[union-attr]
        assert before == replace(problem, chunks=before.chunks, rules=before.rules, p2p=p2p)
        assert before.placements == problem.placements
        assert bool(before.rules.allow_empty) == bool(problem.rules.allow_empty)
        assert before.as_cut_in(cut) == problem.as_cut_in(cut) == cut


@pytest.mark.parametrize(("changes", "part"), [
    ({"layers": [EMBEDDING, {**BLOCK, "forward": 3}, HEAD]}, "layers"),
    ({"placement": "single"}, "placement"),
    ({"cut": {"first": 1}}, "partition"),
    ({"cut": {"together": [["block.1", "block.2"]]}}, "partition"),
    ({"devices": ["slow", "fast"]}, "devices"),
])  # fmt: skip
def test_a_cut_of_another_problem_is_refused(changes: dict[str, Any], part: str) -> None:
    cut = layered().cut_into(Placement.of("v", 2), Cut.at((0, 3, 5, 8, 10)))
    with pytest.raises(zbv.InvalidInput, match=f"/problem/{part}"):
        layered(**changes).as_cut_in(cut)


def test_layers_go_to_the_placement_that_is_asked_for() -> None:
    problem = layered(placement="loop", chunks=2)
    cut = problem.cut_into(problem.placements[0], Cut.at((0, 3, 5, 8, 10)))
    names = [uncut(cut, kind).placements[0].name for kind in ("v", "loop", "single")]
    assert names == ["v", "loop-2", "single"]
    assert uncut(cut, Placement.of("loop", 2, 3)).placements == (Placement.of("loop", 2, 3),)


def test_auto_tries_the_placements_that_have_layers_enough() -> None:
    for p, names in ((1, "single"), (2, "v loop-2 loop-3 loop-4 single"), (4, "v loop-2 single")):
        assert [*names.split()] == [of.name for of in layered(placement="auto", pp_degree=p).placements]


@pytest.mark.parametrize(("values", "integers"), [
    ([0.1, 0.2, 0.3, 0.1 + 0.2], [1, 2, 3, 3]),
    ([1e12, 1], [10**12, 1]),
    ([0.0, 0.0], [0, 0]),
    ([], []),
    ([1e15, 1.0], None),
    ([math.pi, math.e, math.sqrt(2), math.sqrt(3)], None),
])  # fmt: skip
@pytest.mark.parametrize("factor", [1.0, 2.0**-70, 2.0**60])
def test_common_units_make_integers(values: list[float], integers: list[int] | None, factor: float) -> None:
    scale = numeric.integer_scale([value * factor for value in values], 1 << 40)
    assert (scale is None) == (integers is None)
    if scale is not None:
        assert [value * factor * scale for value in values] == pytest.approx(integers, rel=1e-12)


@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=12), decades(1e-90, 1e10))
def test_the_integers_do_not_depend_on_the_unit(values: list[int], unit: float) -> None:
    scale, divisor = numeric.integer_scale([value * unit for value in values], 1 << 40), math.gcd(*values)
    assert [round(value * unit * (scale or 0)) for value in values] == [value // divisor for value in values]


@given(rough_problems())
def test_costs_in_the_search_s_unit_equal_the_caller_s_costs(problem: Problem) -> None:
    own, unit = in_search_unit(problem)
    theirs = problem.arrays.duration
    assert own.arrays.duration * unit == pytest.approx(theirs, rel=1e-10, abs=float(theirs.max()) * 1e-90)


@given(decades(1e-100, 1e15), st.floats(-1.5, 1.5))
def test_clean_deltas_sum_to_zero_and_are_a_fixed_point(forward: float, share: float) -> None:
    held = np.array([forward])
    inputs, weights = numeric.clean_deltas(held, share * held)
    assert held + inputs + weights == 0 >= weights
    assert numeric.clean_deltas(held, inputs) == (inputs, weights)


@pytest.mark.parametrize("unit", [1e-12, 1.0, 1e12])
def test_feasibility_and_the_verifier_tolerate_the_same_share_in_every_unit(unit: float) -> None:
    """With an absolute tolerance, tiny limits would not hold, and large ones would refuse rounding."""
    orders = zbv.Orders.from_text([["0F0", "1F0", "1I0", "1W0", "0I0", "0W0"]])

    def below_the_need(share: float) -> Problem:
        half, limit = (-unit / 2,) * 2, 2 * unit * (1 - share)
        return replace(uniform(1, 1), memory=Memory((unit, unit), half, half, (0.0,), (limit,)))

    below_the_need(numeric.FEASIBLE_MEMORY / 2).require_feasible()
    with pytest.raises(zbv.InfeasibleMemory):
        below_the_need(2 * numeric.FEASIBLE_MEMORY).require_feasible()
    verify_orders(below_the_need(numeric.MEMORY_TOLERANCE / 2), orders)
    with pytest.raises(zbv.InvalidPlan, match="memory"):
        verify_orders(below_the_need(2 * numeric.MEMORY_TOLERANCE), orders)


PROBLEM = uniform(4, 64, p2p=1)
ALL = Jitter.of(0.05, 0.2, 0.1)
NORMAL = np.random.default_rng(1).standard_normal(100_000)


def test_a_factor_has_mean_1_and_the_stated_deviation_or_is_one_of_the_samples() -> None:
    factors = Spread(0.2).factors(NORMAL)
    assert (factors.mean(), factors.std()) == pytest.approx((1, 0.2), abs=2e-3)
    assert factors.min() > 0
    values, counts = np.unique(Spread(samples=(2.0, 0.5, 1.0)).factors(NORMAL), return_counts=True)
    assert values.tolist() == [0.5, 1.0, 2.0]
    assert counts == pytest.approx(len(NORMAL) / 3, rel=0.03)


def test_draws_depend_on_seed_chain_and_iteration_and_not_on_what_else_is_drawn() -> None:
    together = draw(ALL, PROBLEM, 7, range(4), 3)
    for many, one in zip(together, draw(ALL, PROBLEM, 7, [2], 3), strict=True):
        assert np.array_equal(many[:, 2:3], one)
    for kind in ("action", "transfer", "rank"):
        alone = draw(Jitter.of(**{kind: 0.2}), PROBLEM, 7, range(4), 3)._asdict()
        assert all((part == 1).all() == (name != kind) for name, part in alone.items())
        assert kind != "transfer" or np.array_equal(alone[kind], together.transfer)
    others = (draw(ALL, PROBLEM, *of).action for of in ((8, [2], 3), (7, [1], 3), (7, [2], 4)))
    assert all(not np.array_equal(together.action[:, 2:3], other) for other in others)


def test_a_fused_backward_shares_the_draw_of_its_input_half_and_every_rank_may_have_its_own_spread() -> None:
    action = draw(ALL, PROBLEM, 0, [0], 0).action.reshape(4, -1)
    assert np.array_equal(action[B], action[I])
    assert not np.array_equal(action[F], action[I])
    rank = draw(Jitter(rank=(Spread(), *[Spread(0.1)] * 3)), PROBLEM, 0, range(2), 0).rank
    assert ((rank[0] == 1).all(), (rank[1:] != 1).all()) == (True, True)
    with pytest.raises(zbv.InvalidInput, match="/rank: found 2 values; must be one, or one per rank"):
        draw(Jitter(rank=(Spread(), Spread())), PROBLEM, 0, [0], 0)
