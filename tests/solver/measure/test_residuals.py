"""Jitter from traces: factors of actions, ranks and transfers."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from support.orders import random_orders
from support.rank_traces import trace_documents
from zbv_solver.errors import InvalidInput
from zbv_solver.measure.rank_trace import parse_rank_trace
from zbv_solver.measure.refit import jitter_of_traces
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_problem


@pytest.fixture
def problem() -> Problem:
    costs = {"forward": 100, "backward_input": 120, "backward_weight": 80, "p2p": 10}
    return parse_problem({"pp_degree": 2, "microbatches": 6, "costs": costs, "units": {"time": "us"}})


def traces_of(problem: Problem, steps: int = 4) -> list[dict[str, Any]]:
    return trace_documents(problem, random_orders(problem, Random(1)), steps=steps)


def test_traces_without_variation_give_factors_of_1(problem: Problem) -> None:
    found = jitter_of_traces(problem, [parse_rank_trace(each) for each in traces_of(problem)])
    for spread in (*found.actions[:3], *found.rank, found.transfer):
        assert set(spread.samples) <= {1.0}


def test_slow_steps_of_a_rank_are_not_taken_for_slow_actions(problem: Problem) -> None:
    documents = traces_of(problem)
    for record in documents[1]["steps"][2]["actions"]:  # rank 1 is twice as slow in one step
        record[3] = record[2] + 2 * (record[3] - record[2])
    slow = next(record for record in documents[0]["steps"][0]["actions"] if record[0] == "0F3")
    slow[3] = slow[2] + 3 * (slow[3] - slow[2])
    found = jitter_of_traces(problem, [parse_rank_trace(each) for each in documents])
    assert sorted(set(found.rank[0].samples)) == [1.0, 2.0]
    assert len(found.rank[0].samples) == 2 * 4
    assert found.rank[0].samples.count(2.0) == 1
    forward = found.actions[0].samples
    assert (max(forward), forward.count(3.0)) == (3.0, 1)


def test_many_factors_become_quantiles(problem: Problem) -> None:
    documents = traces_of(problem, steps=60)
    noise = np.random.default_rng(1)
    for document in documents:
        for step in document["steps"]:
            for record in step["actions"]:
                record[3] = record[2] + round((record[3] - record[2]) * noise.lognormal(0, 0.1))
    found = jitter_of_traces(problem, [parse_rank_trace(each) for each in documents])
    assert len(found.actions[0].samples) == 1000
    assert np.std(np.log(found.actions[0].samples)) == pytest.approx(0.1, rel=0.1)


def test_a_trace_of_another_problem_is_refused(problem: Problem) -> None:
    (trace, *_) = [parse_rank_trace(each) for each in traces_of(problem)]
    smaller = parse_problem(
        {
            "pp_degree": 2,
            "microbatches": 2,
            "costs": {"forward": 1, "backward_input": 1, "backward_weight": 1},
        }
    )
    with pytest.raises(InvalidInput, match="use traces of a plan of this problem"):
        jitter_of_traces(smaller, [trace])
