"""Exports that other programs read: read back, they are the plan."""

from __future__ import annotations

import csv
import io
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cut_models import cut_problem
from support.orders import random_orders
from support.problems import problems
from support.titan_configuration import FULL, SELECTIVE, UNTOUCHED, configured, rows_of
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)
from zbv_solver.construct.baselines import order_of
from zbv_solver.errors import InvalidInput
from zbv_solver.export import FORMATS, export
from zbv_solver.export.torch_csv import parse, relabelled
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.assemble import make_plan
from zbv_solver.timing.start_times import evaluate, memory_profile

plans = st.builds(
    lambda problem, random: make_plan(problem, random_orders(problem, random), method="random"),
    problems(kinds=("v", "loop", "single"), loop_chunks=(2,)),  # torchtitan cannot describe more
    st.randoms(use_true_random=True),
)
COSTS = {"forward": 3, "backward_input": 2.5, "backward_weight": 2, "p2p": 0.25}
NAMES = ["embedding", *(f"block.{copy}" for copy in range(6)), "head"]


def plan_of(text: list[list[str]], placement: str = "v", **more: Any) -> Plan:
    microbatches = len({action.partition("F")[2] for row in text for action in row if "F" in action})
    sizes = {"pp_degree": len(text), "microbatches": microbatches, "placement": placement}
    problem = parse_problem({**sizes, "costs": COSTS, **more})
    return make_plan(problem, Orders.from_text(text), method="by hand")


def cut_plan(names: list[str], sizes: Sequence[int], recomputed: Sequence[bool]) -> Plan:
    problem = cut_problem(names, tuple(sizes), tuple(recomputed))
    return make_plan(problem, random_orders(problem, Random(1)), method="random")


def events_of(plan: Plan, phase: str) -> list[dict[str, Any]]:
    document = json.loads(export(plan, "chrome-trace"))
    return [event for event in document["traceEvents"] if event["ph"] == phase]


@given(plans)
def test_every_format_for_programs_is_read_back(plan: Plan) -> None:
    """PyTorch's formats number microbatches as the last stage runs them, which changes no time."""
    renamed = relabelled(plan.orders, plan.problem.n_stages)
    last = (renamed.stage == plan.problem.n_stages - 1) & (renamed.letter == 0)
    assert renamed.microbatch[last].tolist() == list(range(plan.problem.microbatches))
    timing = evaluate(plan.problem, plan.orders)
    assert np.array_equal(evaluate(plan.problem, renamed).end, timing.end)

    for form in ("torch-csv", "torch-comms-csv"):
        read = parse(export(plan, form))
        assert (read.orders, read.placement.rank_of) == (renamed, plan.problem.placement.rank_of)
        assert (read.microbatches, read.pairs, read.renamed) == (plan.problem.microbatches, 0, 0)
        assert (read.communication is not None) == (form == "torch-comms-csv")
    assert [*csv.reader(io.StringIO(export(plan, "torch-csv")))] == renamed.all_text()
    assert rows_of(export(plan, "torchtitan")) == renamed.all_text()

    events = events_of(plan, "X")
    assert [event["name"] for event in events] == [text for row in plan.orders.all_text() for text in row]
    assert [event["tid"] for event in events] == plan.orders.rank_index().tolist()
    assert [event["ts"] for event in events] == timing.start.tolist()
    assert [event["ts"] + event["dur"] for event in events] == pytest.approx(timing.end.tolist())


def test_formats_say_how_to_save_and_serve_them_and_others_are_refused() -> None:
    for name, form in FORMATS.items():
        assert (form.name, form.suffix[0], "/" in form.media_type) == (name, ".", True)
    with pytest.raises(InvalidInput, match=r"'pdf'.*torch-csv, .*chrome-trace, svg, html"):
        export(plan_of([["0F0", "1F0", "1B0", "0B0"]]), "pdf")


# --- Trace Event Format


def test_trace_events_name_their_action_and_rank() -> None:
    plan = plan_of([["0F0", "3F0", "3B0", "0B0"], ["1F0", "2F0", "2B0", "1B0"]])
    event = events_of(plan, "X")[0]
    assert (event["name"], event["cat"]) == ("0F0", "forward")
    assert event["args"] == {"stage": 0, "chunk": 0, "microbatch": 0, "letter": "F"}
    threads = [each for each in events_of(plan, "M") if each["name"] == "thread_name"]
    assert {each["tid"]: each["args"]["name"] for each in threads} == {0: "rank 0", 1: "rank 1"}
    assert events_of(plan, "C") == [], "a problem without memory has no counters"


@pytest.mark.parametrize(
    ("unit", "microseconds"), [("ns", 0.003), ("us", 3), ("ms", 3000), ("s", 3e6), ("ticks", 3), (None, 3)]
)
def test_trace_times_are_microseconds(unit: str | None, microseconds: float) -> None:
    plan = plan_of([["0F0", "1F0", "1B0", "0B0"]], units={"time": unit})
    assert events_of(plan, "X")[0]["dur"] == pytest.approx(microseconds)


def test_trace_counts_the_memory_of_every_rank() -> None:
    memory = {"forward": 2, "backward_input": 0.5, "backward_weight": -2.5, "static": [1, 4]}
    problem = parse_problem({"pp_degree": 2, "microbatches": 3, "costs": COSTS, "memory": memory})
    plan = make_plan(problem, random_orders(problem, Random(6)), method="random")
    held: dict[str, list[float]] = defaultdict(list)
    for event in events_of(plan, "C"):
        held[event["name"]].append(event["args"]["held"])

    during, _ = memory_profile(plan.problem, plan.orders)
    for rank, static in enumerate((1, 4)):
        values = held[f"memory rank {rank}"]
        assert values[0] == values[-1] == static
        assert max(values) == max(during[plan.orders.slice_of(rank)]) == plan.metrics.peak_memory[rank]


# --- torchtitan


@given(plans)
def test_the_settings_of_torchtitan_fit_the_plan(plan: Plan) -> None:
    text, problem = export(plan, "torchtitan"), plan.problem
    own = configured(text, "newer").parallelism
    assert own.pipeline_parallel_degree == problem.pp_degree
    if problem.pp_degree == 1:
        assert own.pipeline_parallel_schedule_csv is None
        return
    assert Path(own.pipeline_parallel_schedule_csv).read_text() == export(plan, "torch-csv")
    assert own.num_pp_microbatches == problem.microbatches
    assert configured(text, "0.3.0").training.local_batch_size == problem.microbatches

    cut_by = get_schedule_class(own.pipeline_parallel_schedule)
    assert (cut_by is ScheduleZBVZeroBubble) == (problem.placement.kind == "v")
    assert issubclass(cut_by, PipelineScheduleSingle) == (problem.placement.chunks == 1)


def test_a_split_backward_turns_off_what_cannot_be_split() -> None:
    split = plan_of([["0F0", "0F1", "1F0", "1I0", "1F1", "1W0", "1B1", "0B0", "0B1"]])
    fused = plan_of([["0F0", "0F1", "1F0", "1B0", "1F1", "1B1", "0B0", "0B1"]])
    config = configured(export(split, "torchtitan"), "newer")
    assert (config.compile.enable, config.activation_checkpoint) == (False, None)
    assert configured(export(fused, "torchtitan"), "newer").compile.enable == UNTOUCHED


def test_more_than_two_stages_per_rank_are_refused_with_a_way_out() -> None:
    plan = plan_of([["0F0", "1F0", "2F0", "2B0", "1B0", "0B0"]], "loop", chunks=3)
    with pytest.raises(InvalidInput, match=r"/problem/chunks: found 3.*torch-csv"):
        export(plan, "torchtitan")


def test_the_layers_of_a_language_model_are_named_as_torchtitans_modules() -> None:
    own = configured(export(cut_plan(NAMES, (2, 2, 2, 2), [False] * 4), "torchtitan"), "newer").parallelism
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
    text = export(cut_plan(NAMES, (2, 2, 2, 2), recomputed), "torchtitan")
    assert configured(text, "newer").activation_checkpoint == expected
    assert ("# Planned to be recomputed: 1, 3." in text) == is_said == ("checkpoint yourself" in text)


@pytest.mark.parametrize(
    ("modules", "expected", "is_said"), [(("op",), SELECTIVE, False), (("mlp", "moe_act"), None, True)]
)
def test_what_torchtitan_recomputes_of_a_block_are_its_own_operations(
    modules: Any, expected: str | None, is_said: bool
) -> None:
    """Recomputation of whole blocks would take longer than planned."""
    cut = cut_problem(NAMES, (4, 4), (True, True), placement="single")
    assert cut.model is not None
    model = replace(cut.model, model=replace(cut.model.model, recompute_modules=modules))
    orders = order_of("1f1b", cut.placement, cut.microbatches)
    text = export(make_plan(replace(cut, model=model), orders, method="by hand"), "torchtitan")
    assert configured(text, "newer").activation_checkpoint == expected
    assert (f"recomputed: {', '.join(modules)} of the stages 0, 1." in text) == is_said
