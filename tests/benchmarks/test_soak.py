"""The soak test: its independent model and its checks; it notices a wrong bound."""

from __future__ import annotations

import json
from contextlib import nullcontext
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any, NoReturn

import pytest
from zbv_solver import bounds
from zbv_solver.errors import InfeasibleMemory
from zbv_solver.problem.problem import Problem

from benchmarks.soak import checks
from benchmarks.soak.checks import Contradiction, Coverage
from benchmarks.soak.draw import copied_stages, draw, number_source, paired_stages
from benchmarks.soak.optimum import enumerated, solved
from benchmarks.soak.pipeline import D, F, I, O, R, W, ascending, read
from benchmarks.soak.run import replay, soak, summary

SEED = 7


def quiet(line: str) -> None:
    """Says nothing."""


def test_a_short_run_finds_no_contradiction_and_prints_its_counts(tmp_path: Path) -> None:
    ended = soak(SEED, tmp_path, problems=4, say=quiet)
    assert ended.found is None
    assert ended.coverage.problems.total() == 4
    assert ended.coverage.exact.total() > 0
    assert {"bound: quick", "bound: full", "windows: head", "round trip"} <= set(ended.coverage.checks)
    assert "4 problems" in summary(ended)


def test_a_wrong_bound_stops_the_run_and_the_replay_of_its_file_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = bounds.lower_bound

    def wrong(problem: Problem, effort: bounds.BoundEffort = "full") -> bounds.Bound:
        bound = true(problem, effort)
        return bounds.Bound(bound.value * 1.5 + 1e-3, bound.reason)

    with monkeypatch.context() as patch:
        patch.setattr(bounds, "lower_bound", wrong)
        ended = soak(SEED, tmp_path, problems=20, say=quiet)
        assert ended.found is not None
        case = json.loads(ended.found.read_text())
        assert case["found"].startswith("bound: quick")
        assert case["command"] == f"python -m benchmarks soak --replay {ended.found}"
        assert not replay(ended.found, quiet)
    assert replay(ended.found, quiet)


def test_an_error_of_the_library_is_a_contradiction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(problem: Problem, effort: bounds.BoundEffort = "full") -> bounds.Bound:
        raise ZeroDivisionError("integer modulo by zero")

    monkeypatch.setattr(bounds, "lower_bound", broken)
    ended = soak(SEED, tmp_path, problems=20, say=quiet)
    assert ended.found is not None
    assert "ZeroDivisionError" in json.loads(ended.found.read_text())["traceback"]


@pytest.mark.parametrize(("short", "is_wrong"), [(0.0, True), (5e-10, False), (1e-3, False)])
def test_a_search_may_refuse_layers_that_fit_only_for_the_tolerance(
    short: float, is_wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    deltas = {"forward": 300.0, "backward_input": -100.0, "backward_weight": -200.0}
    layer = {
        **{"forward": 1.0, "backward_input": 1.0, "backward_weight": 1.0, "backward": 3.0},
        "memory": {**deltas, "static": 0.0, "workspace": 0.0},
    }
    document: dict[str, Any] = {
        **{"pp_degree": 1, "microbatches": 1, "placement": "v", "objective": "span"},
        "layers": [{"name": name, **layer, "output_bytes": 0.0} for name in ("one", "other")],
        "cut": {"allow_empty": False, "together": []},
        **{"costs": {"p2p": 0.0}, "memory": {"static": 0.0, "limit": 600.0 * (1 - short)}},
    }

    def refuse(*_: object) -> NoReturn:
        raise InfeasibleMemory((600.0,), (600.0 * (1 - short),), of_cut=True)

    monkeypatch.setattr(checks, "search", refuse)
    with pytest.raises(Contradiction, match="1 of 1 cuts fit") if is_wrong else nullcontext():
        checks.check("layers, ties", document, "0", Coverage())


@pytest.mark.parametrize("with_pairs", [False, True])
def test_enumeration_and_cp_sat_agree_on_the_optimum(with_pairs: bool) -> None:
    agreed = 0
    for number in range(60):
        chance = Random(f"agree/{number}")
        document = paired_stages(chance, number_source(chance, "ties")) if with_pairs else draw(chance)[1]
        if "layers" in document or not read(document).is_feasible():
            continue
        listed = enumerated(read(document))
        found = solved(read(document), with_presolve=number % 2 == 0) if listed else None
        if listed is None or found is None or not found.is_exact:
            continue
        assert abs(listed.value - found.value) <= listed.value * Fraction(1, 10**9)
        agreed += 1
    assert agreed > 5


def test_problems_with_copies_have_optima_that_plans_reach_and_bounds_do_not_exceed() -> None:
    coverage = Coverage()
    for number in range(3):
        chance = Random(f"copies/{number}")
        document = copied_stages(chance, number_source(chance, "small integers"))
        checks.check("copies, small integers", document, str(number), coverage)
    assert coverage.exact.total() > 0
    assert coverage.checks["independent optimum"] >= 3


def test_copies_are_timed_as_documented() -> None:
    """The copy out takes until 1 + 4, then D frees, and the copy in takes until 5 + 2: I begins there."""
    document: dict[str, Any] = {
        **{"pp_degree": 1, "microbatches": 1, "placement": "single", "objective": "makespan"},
        "costs": {
            **{"forward": [1.0], "backward_input": [3.0], "backward_weight": [5.0], "p2p": []},
            **{"offload": [4.0], "reload": [2.0]},
        },
        "memory": {
            **{"forward": [2.0], "backward_input": [-1.0], "static": [0.0], "limit": [2.0]},
            "offloadable": [2.0],
        },
    }
    order = (((F, 0, 0), (O, 0, 0), (D, 0, 0), (R, 0, 0), (I, 0, 0), (W, 0, 0)),)
    pipeline = read(document)
    assert pipeline.value(order) == 1 + 4 + 2 + 3 + 5
    assert pipeline.fits(0, order[0])
    assert solved(pipeline).value == 1 + 3 + 5


def test_an_order_is_timed_as_documented() -> None:
    """Two ranks, one microbatch, a transfer of 1/2 each way; the span of rank 0 alone is its window."""
    document: dict[str, Any] = {
        "pp_degree": 2,
        "microbatches": 1,
        "placement": "single",
        "objective": "span",
        "costs": {
            "forward": [1.0, 2.0],
            "backward_input": [3.0, 4.0],
            "backward_weight": [5.0, 6.0],
            "backward": None,
            "p2p": [0.5],
        },
    }
    order = (((0, 0, 0), (1, 0, 0), (2, 0, 0)), ((0, 1, 0), (1, 1, 0), (2, 1, 0)))
    assert read(document).value(order) == 1 + 0.5 + 2 + 4 + 0.5 + 3 + 5
    assert read({**document, "objective": "makespan"}).value(order) == 16
    unwound = (((1, 0, 0), (0, 0, 0), (2, 0, 0)), order[1])
    assert read(document).value(unwound) is None


def test_microbatches_are_renumbered_to_ascend_with_their_weights() -> None:
    order = (((0, 0, 1), (0, 0, 0), (1, 0, 0), (3, 0, 1), (2, 0, 0)),)
    assert ascending(order) == (((0, 0, 0), (0, 0, 1), (1, 0, 0), (3, 0, 1), (2, 0, 0)),)
