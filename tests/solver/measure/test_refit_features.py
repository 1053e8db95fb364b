"""Refitting problems whose microbatches differ: coefficients by non-negative least squares."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.plans import write_plan
from support.rank_traces import mixed_orders, trace_documents
from zbv_solver.commands.cli import main
from zbv_solver.measure.rank_trace import RankTrace, parse_rank_trace
from zbv_solver.measure.refit import (
    fitted,
    jitter_of_traces,
    largest_change,
    non_negative_least_squares,
    refit,
    relative_residual,
)
from zbv_solver.plans.plan import identity
from zbv_solver.problem.problem import B, Problem
from zbv_solver.problem.reading import parse_problem
from zbv_solver.problem.stages import Costs
from zbv_solver.problem.writing import problem_json
from zbv_solver.timing.start_times import evaluate

DOCUMENT: dict[str, Any] = {
    "pp_degree": 2,
    "microbatches": 6,
    "sequences": [[100], [30, 40], [200], [64, 64], [10], [150]],
    "costs": {
        "forward": {"fixed": 5, "tokens": 0.1, "tokens_squared": 0.001},
        "backward_input": {"fixed": 5, "tokens": 0.12, "tokens_squared": 0.002},
        "backward_weight": {"tokens": 0.1},
        "p2p": {"fixed": 2, "tokens": 0.01},
    },
    "units": {"time": "us"},
}


def really() -> Problem:
    """Other coefficients, different on every stage."""
    costs = {
        "forward": {
            "fixed": [7, 8, 9, 10],
            "tokens": [0.2, 0.3, 0.2, 0.1],
            "tokens_squared": [0.002, 0.001, 0.003, 0.002],
        },
        "backward_input": {"fixed": 9, "tokens": 0.2, "tokens_squared": 0.004},
        "backward_weight": {"fixed": 3, "tokens": [0.2, 0.25, 0.3, 0.35]},
        "p2p": {"fixed": 4, "tokens": 0.02},
    }
    return parse_problem({**DOCUMENT, "costs": costs})


def parts(problem: Problem) -> list[Costs]:
    """The fixed part and the coefficients of every feature."""
    return [problem.costs, *(each.costs for each in problem.features)]


def traces_of(problem: Problem, fused: int = 0, **how: Any) -> list[RankTrace]:
    """Traces of a run in which the last microbatches have whole backwards."""
    orders = mixed_orders(problem, lambda j: j >= problem.microbatches - fused)
    return [parse_rank_trace(document) for document in trace_documents(problem, orders, **how)]


def test_the_coefficients_of_every_stage_are_recovered() -> None:
    actual = really()
    found = refit(parse_problem(DOCUMENT), traces_of(actual))
    assert found.costs.backward is None
    for name in ("forward", "backward_input", "backward_weight"):
        for mine, theirs in zip(parts(found), parts(actual), strict=True):
            assert getattr(mine, name) == pytest.approx(getattr(theirs, name), rel=0.02, abs=0.003)
    assert relative_residual(found, traces_of(actual)) < 1e-4
    assert largest_change(actual, found) < 1e-2
    assert largest_change(parse_problem(DOCUMENT), found) > 0.5


def test_too_few_kinds_scale_the_planned_coefficients() -> None:
    """A B that only one microbatch ran says nothing about single features."""
    planned = parse_problem(DOCUMENT)
    doubled = replace(
        planned,
        costs=planned.costs.mapped(lambda values: tuple(2 * value for value in values)),
        features=tuple(
            replace(each, costs=each.costs.mapped(lambda values: tuple(2 * value for value in values)))
            for each in planned.features
        ),
    )
    found = refit(planned, traces_of(doubled, fused=1))
    assert found.costs.backward is not None
    assert found.arrays.duration[B] == pytest.approx(2 * planned.arrays.duration[B], rel=1e-3)


def test_stages_without_a_trace_stay_as_planned() -> None:
    planned = parse_problem(DOCUMENT)
    found = refit(planned, traces_of(really())[:1])
    for mine, theirs in zip(parts(found), parts(planned), strict=True):
        assert mine.forward[1:3] == theirs.forward[1:3]
    assert found.costs.forward[0] != planned.costs.forward[0]


@pytest.mark.parametrize("seed", range(5))
def test_no_other_coefficients_fit_better(seed: int) -> None:
    """The best fit over every choice of the coefficients that are not 0."""
    random = np.random.default_rng(seed)
    design, target = random.normal(size=(7, 4)), random.normal(size=7)
    found = non_negative_least_squares(design, target)
    best = float(target @ target)
    for count in range(1, 5):
        for chosen in map(list, combinations(range(4), count)):
            fit = np.linalg.lstsq(design[:, chosen], target, rcond=None)[0]
            if (fit >= 0).all():
                best = min(best, float(np.sum((design[:, chosen] @ fit - target) ** 2)))
    assert (found >= 0).all()
    assert float(np.sum((design @ found - target) ** 2)) == pytest.approx(best, rel=1e-9)


def test_microbatches_that_take_no_time_do_not_hide_the_others() -> None:
    amounts = np.array([[1.0, 0.0], [1.0, 2.0]])
    found = fitted(amounts, np.array([[0.0], [1.0]]), np.array([[0.0, 800.0]]))
    assert found.ravel() == pytest.approx([0, 400])


def test_microbatches_that_take_what_is_planned_show_no_jitter() -> None:
    problem = parse_problem(DOCUMENT)
    jitter = jitter_of_traces(problem, traces_of(problem))
    factors = [sample for spread in (*jitter.actions, *jitter.rank) for sample in spread.samples]
    assert factors
    assert factors == pytest.approx([1.0] * len(factors), abs=0.02)


def test_the_command_says_how_well_the_coefficients_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = parse_problem(DOCUMENT)
    orders = mixed_orders(problem, lambda _j: False)
    plan = write_plan(tmp_path / "plan.json", problem, orders)
    plan_id = identity(problem_json(problem), orders.all_text())
    paths = []
    for rank, document in enumerate(trace_documents(really(), orders, plan_id=plan_id)):
        paths.append(str(tmp_path / f"trace-{rank}.json"))
        Path(paths[-1]).write_text(json.dumps(document))
    assert main(["refit", str(plan), *paths, "-o", str(tmp_path / "measured.json")]) == 0
    assert "relative residual 0.0%" in capsys.readouterr().err
    found = parse_problem(json.loads((tmp_path / "measured.json").read_text()))
    assert evaluate(found, orders).span == pytest.approx(evaluate(really(), orders).span, rel=0.01)
