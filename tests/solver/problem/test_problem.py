"""What problems mean: the costs and memory of stages, of microbatches that differ, and of cuts of layers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from support.cuts import BLOCK, EMBEDDING, HEAD, RECOMPUTE, layered
from support.problems import DIFFERING, differing_problems, problems, rough_problems, uniform
from support.reference import all_orders_of_one_microbatch, peak_memory
from zbv_solver.errors import InfeasibleMemory, InvalidInput
from zbv_solver.problem.cut import Cut
from zbv_solver.problem.problem import B, F, I, Problem, W, require_same_problem
from zbv_solver.problem.reading import parse_problem
from zbv_solver.problem.stages import Costs, Memory, Placement


def test_a_cost_is_its_fixed_part_plus_coefficients_times_features() -> None:
    arrays = parse_problem(DIFFERING).arrays
    for microbatch, tokens in enumerate([4, 2, 1]):
        kind = arrays.kind_of[microbatch]
        forward, inputs = 20 - tokens + 0.5 * tokens**2, 3 * tokens
        assert arrays.duration[:, 0, kind].tolist() == [forward, inputs, 7, inputs + 7]
        assert arrays.duration[I, 7, kind] == 4 * tokens
        assert arrays.latency[:, kind].tolist() == [5 + tokens] * 3 + [0] + [5 + tokens] * 3
        assert arrays.delta[:, 0, kind].tolist() == [2 * tokens, -tokens, -tokens, -2 * tokens]


@pytest.mark.parametrize(
    ("tokens", "kind_of"), [([2, 2, 2], [0, 0, 0]), ([1, 2, 1], [0, 1, 0]), ([3, 2, 1], [2, 1, 0])]
)
def test_microbatches_are_of_one_kind_if_they_cost_the_same(tokens: list[int], kind_of: list[int]) -> None:
    squares = [number**2 for number in tokens]
    features = {"tokens": tokens, "tokens_squared": squares, "unused": [1, 2, 3]}
    problem = parse_problem({**DIFFERING, "features": features})
    assert problem.arrays.kind_of.tolist() == kind_of
    assert problem.is_equal == (max(kind_of) == 0)


def test_a_sum_that_is_zero_up_to_rounding_is_zero() -> None:
    costs = {**DIFFERING["costs"], "forward": {"fixed": 0.3, "tokens": -0.1}}
    problem = parse_problem(
        {**DIFFERING, "features": {**DIFFERING["features"], "tokens": [3, 2, 1]}, "costs": costs}
    )
    assert problem.arrays.duration[F, 0, problem.arrays.kind_of[0]] == 0


@given(differing_problems() | rough_problems())
def test_every_microbatch_releases_what_it_holds_and_the_average_one_keeps_the_loads(
    problem: Problem,
) -> None:
    delta, average = problem.arrays.delta, problem.averaged()
    assert (delta[F] + delta[I] + delta[W] == 0).all()
    assert (delta[F] + delta[B] == 0).all()
    assert average.is_equal
    for own, mean in (
        (problem.arrays.duration, average.arrays.duration),
        (delta, average.arrays.delta),
        (problem.arrays.latency, average.arrays.latency),
    ):
        total = own @ problem.arrays.count
        assert mean[..., 0] * problem.microbatches == pytest.approx(total, rel=1e-8)


@given(problems(max_p=3, max_m=1))
def test_the_smallest_limit_is_the_lowest_peak_of_any_order(problem: Problem) -> None:
    """Exhaustively, for one microbatch: more of them can only add memory."""
    peaks = [peak_memory(problem, orders) for orders in all_orders_of_one_microbatch(problem)]
    leanest = tuple(min(column) for column in zip(*peaks, strict=True))
    assert leanest == pytest.approx(problem.smallest_limit)


def test_an_infeasible_limit_names_the_ranks_and_what_the_largest_microbatch_needs() -> None:
    with pytest.raises(InfeasibleMemory, match=r"rank 3: 17\.5 < 18") as caught:
        parse_problem(DIFFERING).require_feasible()
    assert list(caught.value.ranks) == [0, 3]
    assert list(caught.value.smallest) == [17, 17, 17, 18]


def test_a_plan_may_start_from_one_of_the_same_problem_on_another_program() -> None:
    require_same_problem(uniform(2, 2), replace(uniform(2, 2), measured=(("device", "H200"),)))


def test_problems_in_code_are_checked_like_documents() -> None:
    placement, ones = Placement.of("v", 2), (1.0,) * 4
    with pytest.raises(InvalidInput) as caught:
        Problem(
            replace(placement, kind="w"),  # type: ignore[arg-type]
            0,
            Costs(ones, ones[:3], (1.0, -1.0, 1.0, 1.0), ones[:3]),
            Memory.unlimited(placement),
            "time",  # type: ignore[arg-type]
        )
    assert {issue.pointer for issue in caught.value.issues} == {
        *("/placement", "/objective", "/microbatches"),
        *("/costs/backward_input", "/costs/backward_weight/1"),
    }


def test_a_cut_sums_the_layers_of_every_stage() -> None:
    """Recomputed layers have other costs; a rank holds the static memory and the largest workspace."""
    block = {**BLOCK, "recompute": {**RECOMPUTE, "forward": 3}, "output_bytes": 50}
    head = {**HEAD, "backward": 9, "memory": {"workspace": 1}, "parameters_bytes": 6}
    problem = layered(
        layers=[EMBEDDING, block, head],
        costs={"link": {"latency": 2, "bandwidth": 25}},
        memory={"static": [10, 20]},
        cut={"allow_empty": True},
    ).cut_into(Placement.of("v", 2), Cut.at((0, 1, 5, 5, 10), (False, True, False, False)))
    assert vars(problem.costs) == {
        "forward": (1, 4 * 3, 0, 4 * 2 + 5),
        "backward_input": (0, 4 * 4, 0, 4 * 2 + 5),
        "backward_weight": (1, 4 * 1, 0, 4 * 1 + 5),
        "backward": (1, 4 * 5, 0, 4 * 3 + 9),
        "p2p": (2 + 100 / 25, 2 + 50 / 25, 2 + 50 / 25),
    }
    assert vars(problem.memory) == {
        "forward": (0, 4 * 1, 0, 4 * 4),
        "backward_input": (0, 4 * 1, 0, -4 * 2),
        "backward_weight": (0, -4 * 2, 0, -4 * 2),
        "static": (10 + 4 * 1 + 6 + 1, 20 + 4 + 2),
        "limit": None,
    }
    assert problem.model is not None
    assert problem.model.partition[1:3] == (("block.0", "block.1", "block.2", "block.3"), ())


def test_blocking_transfers_are_a_part_of_the_actions() -> None:
    one, other = (
        layered(costs={"p2p": 0.5, "blocking": blocking})
        .cut_into(Placement.of("v", 2), Cut.at((0, 3, 5, 7, 10)))
        .costs
        for blocking in (True, False)
    )
    assert np.subtract(one.forward, other.forward).tolist() == [0.5, 0, 0.5, 0]
    assert np.subtract(one.backward_input, other.backward_input).tolist() == [0, 0.5, 0, 0.5]
    assert (one.p2p, other.p2p) == ((0, 0, 0), (0.5, 0.5, 0.5))


def test_auto_tries_the_placements_that_have_layers_enough() -> None:
    for p, names in (
        (1, ["single"]),
        (2, ["v", "loop-2", "loop-3", "loop-4", "single"]),
        (4, ["v", "loop-2", "single"]),
    ):
        assert [each.name for each in layered(placement="auto", pp_degree=p).placements] == names
