"""Layers whose stages cost something else than thought: they are scaled, and say the same as the stages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.cut_models import cut_problem
from support.layered import RECOMPUTED
from support.rank_traces import mixed_orders, trace_documents
from zbv_solver.measure.rank_trace import parse_rank_trace
from zbv_solver.measure.refit import refit
from zbv_solver.measure.stage_costs import with_stage_costs
from zbv_solver.problem.problem import Costs, Problem
from zbv_solver.problem.reading import parse_any_problem, parse_problem
from zbv_solver.problem.writing import problem_json

PARTITION = [["embedding", "block.0"], ["block.1", "block.2"], ["block.3", "block.4"], ["block.5", "head"]]


def cut(**changes: Any) -> Problem:
    flags = [False, True, True, False]
    question = parse_any_problem({**RECOMPUTED, "partition": PARTITION, "recompute": flags, **changes})
    assert isinstance(question, Problem)
    return question


MEASURED = Costs((5.0, 30.0, 40.0, 50.0), (3.0, 31.0, 41.0, 51.0), (2.0, 32.0, 42.0, 52.0), (7.0, 8.0, 9.0))


def test_the_layers_add_up_to_what_the_stages_cost_and_a_document_of_them_is_that_very_problem() -> None:
    found = with_stage_costs(cut(), MEASURED)
    for name in ("forward", "backward_input", "backward_weight", "p2p"):
        assert getattr(found.costs, name) == pytest.approx(getattr(MEASURED, name)), name
    assert found.costs.backward is None
    assert found.model is not None
    assert [list(names) for names in found.model.partition] == PARTITION
    assert found.model.cut == cut().model.cut  # type: ignore[union-attr]
    assert (found.memory, found.placement, found.units) == (cut().memory, cut().placement, cut().units)
    assert parse_problem(problem_json(found)) == found


def test_a_layer_keeps_its_share_and_its_alternative_is_scaled_alike() -> None:
    model = with_stage_costs(cut(), MEASURED).model
    assert model is not None
    each = dict(zip(model.model.names, model.model.each, strict=True))
    # Of 32 for F of block.5 and the head, 10 and 22 were planned.
    assert each["block.5"].costs.forward == pytest.approx(50 * 10 / 32)
    assert each["head"].costs.forward == pytest.approx(50 * 22 / 32)
    # Stage 1 is recomputed: its I is the alternative's, and what it would be otherwise shrinks with it.
    block = each["block.1"]
    assert block.recompute is not None
    assert block.recompute.backward_input == pytest.approx(31 / 2)
    assert block.costs.backward_input == pytest.approx(31 / 2 * 11 / 21)
    assert block.recompute.memory == cut().model.model.each[2].recompute.memory  # type: ignore[union-attr]


def test_what_was_thought_to_cost_nothing_is_shared_evenly_and_an_empty_stage_costs_nothing() -> None:
    # Four layers for two ranks; stage 2 has none.
    known = cut_problem(["a", "b", "c", "d"], [2, 1, 0, 1])
    free = replace(known.costs, backward_weight=(0.0,) * 4)
    found = with_stage_costs(with_stage_costs(known, free), MEASURED)
    assert found.costs.backward_weight == pytest.approx((2.0, 32.0, 0.0, 52.0))
    assert found.costs.forward == pytest.approx((5.0, 30.0, 0.0, 50.0))
    assert found.model is not None
    assert [layer.costs.backward_weight for layer in found.model.model.each[:2]] == [1.0, 1.0]


def test_a_fused_backward_that_was_measured_is_one_of_layers_too() -> None:
    fused = replace(MEASURED, backward=(4.0, 50.0, 60.0, 70.0))
    found = with_stage_costs(cut(), fused)
    assert found.costs.backward == pytest.approx(fused.backward)
    assert parse_problem(problem_json(found)) == found


def test_stages_without_layers_cost_what_was_measured() -> None:
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
