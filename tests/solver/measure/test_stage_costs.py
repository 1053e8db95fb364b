"""Layers are scaled to measured costs of their stages, and agree with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.cut_models import cut_problem
from support.layered import RECOMPUTED
from support.rank_traces import mixed_orders, trace_documents
from zbv_solver.measure.rank_trace import parse_rank_trace
from zbv_solver.measure.refit import refit, with_stage_costs
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_any_problem, parse_problem
from zbv_solver.problem.stages import Costs
from zbv_solver.problem.writing import problem_json

PARTITION = [["embedding", "block.0"], ["block.1", "block.2"], ["block.3", "block.4"], ["block.5", "head"]]


def cut(**changes: Any) -> Problem:
    flags = [False, True, True, False]
    question = parse_any_problem({**RECOMPUTED, "partition": PARTITION, "recompute": flags, **changes})
    assert isinstance(question, Problem)
    return question


MEASURED = Costs((5.0, 30.0, 40.0, 50.0), (3.0, 31.0, 41.0, 51.0), (2.0, 32.0, 42.0, 52.0), (7.0, 8.0, 9.0))


def test_scaled_layers_sum_to_the_costs_of_stages_and_documents_round_trip() -> None:
    found = with_stage_costs(cut(), MEASURED)
    for name in ("forward", "backward_input", "backward_weight", "p2p"):
        assert getattr(found.costs, name) == pytest.approx(getattr(MEASURED, name)), name
    assert found.costs.backward is None
    assert found.model is not None
    assert [list(names) for names in found.model.partition] == PARTITION
    assert found.model.cut == cut().model.cut  # type: ignore[union-attr]
    assert (found.memory, found.placement, found.units) == (cut().memory, cut().placement, cut().units)
    assert parse_problem(problem_json(found)) == found


def test_a_layer_keeps_its_share_and_its_recomputed_costs_are_scaled_alike() -> None:
    model = with_stage_costs(cut(), MEASURED).model
    assert model is not None
    each = dict(zip(model.model.names, model.model.each, strict=True))
    # Of 32 for F of block.5 and the head, 10 and 22 were planned.
    assert each["block.5"].costs.forward == pytest.approx(50 * 10 / 32)
    assert each["head"].costs.forward == pytest.approx(50 * 22 / 32)
    # Stage 1 is recomputed: its I is the recomputed one, and the plain I is scaled with it.
    block = each["block.1"]
    assert block.recompute is not None
    assert block.recompute.backward_input == pytest.approx(31 / 2)
    assert block.costs.backward_input == pytest.approx(31 / 2 * 11 / 21)
    assert block.recompute.memory == cut().model.model.each[2].recompute.memory  # type: ignore[union-attr]


def test_layers_planned_at_zero_share_evenly_and_an_empty_stage_costs_nothing() -> None:
    # Four layers on two ranks; stage 2 has none.
    known = cut_problem(["a", "b", "c", "d"], [2, 1, 0, 1])
    free = replace(known.costs, backward_weight=(0.0,) * 4)
    found = with_stage_costs(with_stage_costs(known, free), MEASURED)
    assert found.costs.backward_weight == pytest.approx((2.0, 32.0, 0.0, 52.0))
    assert found.costs.forward == pytest.approx((5.0, 30.0, 0.0, 50.0))
    assert found.model is not None
    assert [layer.costs.backward_weight for layer in found.model.model.each[:2]] == [1.0, 1.0]


def test_a_measured_fused_backward_is_divided_among_layers() -> None:
    fused = replace(MEASURED, backward=(4.0, 50.0, 60.0, 70.0))
    found = with_stage_costs(cut(), fused)
    assert found.costs.backward == pytest.approx(fused.backward)
    assert parse_problem(problem_json(found)) == found


def test_without_layers_stages_have_the_measured_costs() -> None:
    plain = replace(cut(), model=None)
    assert with_stage_costs(plain, MEASURED) == replace(plain, costs=MEASURED)


def test_a_refitted_plan_keeps_its_cut() -> None:
    problem = cut()
    really = with_stage_costs(problem, MEASURED)
    orders = mixed_orders(problem, lambda j: j % 2 == 0)
    found = refit(problem, [parse_rank_trace(document) for document in trace_documents(really, orders)])
    assert found.costs.forward == pytest.approx(MEASURED.forward, rel=1e-5)
    assert found.model is not None
    assert [list(names) for names in found.model.partition] == PARTITION
    assert parse_problem(problem_json(found)) == found
