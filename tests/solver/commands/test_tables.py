"""What is said of a cut on the terminal."""

from __future__ import annotations

from support.cuts import BLOCK, RECOMPUTE, layered
from zbv_solver.commands.tables import cut_summary
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.search import search

QUICK = SearchOptions(effort="quick", seed=1)


def summary(problem: LayeredProblem) -> list[str]:
    return cut_summary(search(problem, QUICK)).splitlines()


def test_a_line_says_which_layers_a_rank_has_and_what_they_cost() -> None:
    lines = summary(layered(placement="single", cut={"first": 6}))
    assert lines[0] == "  rank 0: embedding … block.4; 27 a microbatch"
    assert lines[1] == "  rank 1: block.5 … head; 30 a microbatch"
    assert lines[2].startswith("  placement single; no cut of these layers has a span below 120 (gap ")


def test_recomputed_and_empty_stages_are_named() -> None:
    block = {**BLOCK, "recompute": RECOMPUTE, "repeat": 2}
    lines = summary(layered(layers=[block], memory={"limit": 8}, cut={"allow_empty": True}))
    shown = " ".join(lines)
    assert "(recomputed)" in shown
    assert "nothing" in shown


def test_layers_too_coarse_to_go_up_evenly_are_told_of() -> None:
    coarse = summary(layered(layers=[{**BLOCK, "repeat": 5}]))
    assert "some rank has at least 20% more than the mean" in coarse[-1]
    even = summary(layered(layers=[{**BLOCK, "repeat": 8}]))
    assert "no cut of these layers" in even[-1]


def test_layers_that_cost_nothing_have_no_mean_to_exceed() -> None:
    nothing = {"name": "a", "forward": 0, "backward_input": 0, "backward_weight": 0, "repeat": 4}
    assert "no cut of these layers" in summary(layered(layers=[nothing]))[-1]
