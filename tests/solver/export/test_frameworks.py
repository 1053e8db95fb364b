"""Exports for torchtitan: read back, they are the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cut_models import cut_problem
from support.orders import random_orders
from support.problems import problems, uniform
from support.titan_configuration import FULL, SELECTIVE, UNTOUCHED, configured, rows_of
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)
from zbv_solver.construct.baselines import order_of
from zbv_solver.errors import InvalidInput
from zbv_solver.export import export
from zbv_solver.export.torch_csv import relabelled
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.assemble import make_plan
from zbv_solver.verify.verifier import verify_orders

plans = st.builds(
    lambda problem, random: make_plan(problem, random_orders(problem, random), method="random"),
    problems(kinds=("v", "loop", "single"), loop_chunks=(2,)),  # torchtitan cannot describe more
    st.randoms(use_true_random=True),
)
COSTS = {"forward": 2, "backward_input": 3, "backward_weight": 1, "p2p": 0.5}


def plan_of(text: list[list[str]], placement: str = "v", **more: Any) -> Plan:
    problem = parse_problem(
        {"pp_degree": len(text), "microbatches": 2, "placement": placement, "costs": COSTS, **more}
    )
    return make_plan(problem, Orders.from_text(text), method="by hand")


def renamed(plan: Plan) -> Orders:
    return relabelled(plan.orders, plan.problem.n_stages)


# --- torchtitan


@given(plans)
def test_the_schedule_in_the_settings_matches_the_plan(plan: Plan) -> None:
    orders = Orders.from_text(rows_of(export(plan, "torchtitan")))
    assert orders == renamed(plan)
    verify_orders(plan.problem, orders)


@given(plans)
def test_the_settings_fit_the_plan(plan: Plan) -> None:
    text, problem = export(plan, "torchtitan"), plan.problem
    own = configured(text, "newer").parallelism
    assert own.pipeline_parallel_degree == problem.pp_degree
    if problem.pp_degree == 1:
        assert own.pipeline_parallel_schedule_csv is None
        return
    assert own.num_pp_microbatches == problem.microbatches
    assert configured(text, "0.3.0").training.local_batch_size == problem.microbatches

    cut_by = get_schedule_class(own.pipeline_parallel_schedule)
    assert (cut_by is ScheduleZBVZeroBubble) == (problem.placement.kind == "v")
    assert issubclass(cut_by, PipelineScheduleSingle) == (problem.placement.chunks == 1)


def test_a_split_backward_turns_off_what_cannot_be_split() -> None:
    split = plan_of([["0F0", "0F1", "1F0", "1I0", "1F1", "1W0", "1B1", "0B0", "0B1"]])
    fused = plan_of([["0F0", "0F1", "1F0", "1B0", "1F1", "1B1", "0B0", "0B1"]])
    config = configured(export(split, "torchtitan"), "newer")
    assert config.compile.enable is False
    assert config.activation_checkpoint is None
    assert configured(export(fused, "torchtitan"), "newer").compile.enable == UNTOUCHED


def test_torchtitan_reads_the_schedule_from_a_file_of_the_process() -> None:
    plan = make_plan(uniform(2, 3), random_orders(uniform(2, 3), Random(0)), method="random")
    config = configured(export(plan, "torchtitan"), "newer")
    rows = Path(config.parallelism.pipeline_parallel_schedule_csv).read_text()
    assert rows == export(plan, "torch-csv")


def test_more_than_two_stages_per_rank_are_refused_with_a_way_out() -> None:
    plan = plan_of(
        [["0F0", "1F0", "2F0", "2B0", "1B0", "0B0", "0F1", "1F1", "2F1", "2B1", "1B1", "0B1"]],
        "loop",
        chunks=3,
    )
    with pytest.raises(InvalidInput, match=r"/problem/chunks: found 3.*torch-csv"):
        export(plan, "torchtitan")


def cut_plan(names: list[str], sizes: Sequence[int], recomputed: Sequence[bool]) -> Plan:
    problem = cut_problem(names, tuple(sizes), tuple(recomputed))
    return make_plan(problem, random_orders(problem, Random(1)), method="random")


def test_the_layers_of_a_language_model_are_named_as_torchtitans_modules() -> None:
    names = ["embedding", *(f"block.{copy}" for copy in range(6)), "head"]
    own = configured(export(cut_plan(names, (2, 2, 2, 2), [False] * 4), "torchtitan"), "newer").parallelism
    assert own.module_fqns_per_model_part == [
        ["tok_embeddings", "layers.0"],
        ["layers.1", "layers.2"],
        ["layers.3", "layers.4"],
        ["layers.5", "norm", "lm_head"],
    ]


def test_other_layers_are_listed_for_the_reader() -> None:
    names = ["embedding", "block.attention", "block.mlp", "head"]
    text = export(cut_plan(names, (1, 1, 1, 1), [False] * 4), "torchtitan")
    assert configured(text, "newer").parallelism.module_fqns_per_model_part is None
    assert '#   2: ["block.mlp"]' in text.splitlines()
    assert "parallelism.module_fqns_per_model_part" in text


@pytest.mark.parametrize(
    ("recomputed", "expected", "is_said"),
    [([False] * 4, None, False), ([True] * 4, FULL, False), ([False, True, False, True], None, True)],
)
def test_torchtitan_recomputes_all_stages_or_none(
    recomputed: list[bool], expected: str | None, is_said: bool
) -> None:
    names = ["embedding", *(f"block.{copy}" for copy in range(6)), "head"]
    text = export(cut_plan(names, (2, 2, 2, 2), recomputed), "torchtitan")
    assert configured(text, "newer").activation_checkpoint == expected
    assert ("# Planned to be recomputed: 1, 3." in text) == is_said == ("checkpoint yourself" in text)


@pytest.mark.parametrize(
    ("modules", "expected", "is_said"), [(("op",), SELECTIVE, False), (("mlp", "moe_act"), None, True)]
)
def test_what_torchtitan_recomputes_of_a_block_are_its_own_operations(
    modules: Any, expected: str | None, is_said: bool
) -> None:
    """Recomputation of whole blocks would take longer than planned."""
    names = ["embedding", *(f"block.{copy}" for copy in range(6)), "head"]
    cut = cut_problem(names, (4, 4), (True, True), placement="single")
    assert cut.model is not None
    model = replace(cut.model, model=replace(cut.model.model, recompute_modules=modules))
    orders = order_of("1f1b", cut.placement, cut.microbatches)
    text = export(make_plan(replace(cut, model=model), orders, method="by hand"), "torchtitan")
    assert configured(text, "newer").activation_checkpoint == expected
    assert (f"recomputed: {', '.join(modules)} of the stages 0, 1." in text) == is_said
