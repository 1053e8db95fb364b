"""The summary of a cut on the terminal."""

from __future__ import annotations

import pytest
from support.cuts import BLOCK, RECOMPUTE, layered
from zbv_solver.commands.tables import cut_summary, print_frontier
from zbv_solver.frontiers.frontier import FrontierPoint
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search

QUICK = SearchOptions(effort="quick", seed=1)


def summary(problem: LayeredProblem) -> list[str]:
    return cut_summary(search(problem, QUICK)).splitlines()


def test_a_line_names_the_layers_of_a_rank_and_their_cost() -> None:
    lines = summary(layered(placement="single", cut={"first": 5}))
    assert lines[0] == "  rank 0: embedding … block.4; 27 a microbatch"
    assert lines[1] == "  rank 1: block.5 … head; 30 a microbatch"
    assert lines[2].startswith("  placement single; no cut of these layers has a span below 120 (gap ")


def test_recomputed_and_empty_stages_are_named() -> None:
    block = {**BLOCK, "recompute": RECOMPUTE, "repeat": 2}
    lines = summary(layered(layers=[block], memory={"limit": 8}, cut={"allow_empty": True}))
    shown = " ".join(lines)
    assert "(recomputed)" in shown
    assert "nothing" in shown


def test_layers_too_coarse_to_divide_evenly_are_reported() -> None:
    coarse = summary(layered(layers=[{**BLOCK, "repeat": 5}]))
    assert "some rank has at least 20% more than the mean" in coarse[-1]
    even = summary(layered(layers=[{**BLOCK, "repeat": 8}]))
    assert "no cut of these layers" in even[-1]


def test_layers_that_cost_nothing_have_no_mean_to_exceed() -> None:
    nothing = {"name": "a", "forward": 0, "backward_input": 0, "backward_weight": 0, "repeat": 4}
    assert "no cut of these layers" in summary(layered(layers=[nothing]))[-1]


def test_a_frontier_does_not_cut_the_names_of_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    costs = {name: {"tokens": 1000} for name in ("forward", "backward_input", "backward_weight")}
    memory = {"forward": 1, "backward_input": 0, "backward_weight": -1}
    document = {"pp_degree": 2, "microbatches": 2, "features": {"tokens": [1000, 2001]}}
    problem = parse_problem({**document, "costs": costs, "memory": memory})
    plan = search(problem, QUICK)
    print_frontier(problem, [FrontierPoint(1234567.0, plan, plan.objective * 0.812345, 1.0, 1.234567)])
    assert " interleaved-1f1b-practice " in capsys.readouterr().out
