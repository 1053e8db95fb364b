"""Exports that other programs read: read back, they are the plan."""

from __future__ import annotations

import csv
import io
import json
from collections import defaultdict
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.orders import random_orders
from support.problems import differing_problems, problems, uniform
from support.titan_configuration import rows_of
from zbv_solver.errors import InvalidInput
from zbv_solver.export import FORMATS, export
from zbv_solver.export.torch_csv import batch_order, parse, renumbered
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import Problem, Units
from zbv_solver.search.assemble import make_plan
from zbv_solver.timing.start_times import evaluate


def random_plan(problem: Problem, random: Random) -> Plan:
    problem = replace(problem, memory=replace(problem.memory, limit=None))
    return make_plan(problem, random_orders(problem, random), method="random")


def events_of(plan: Plan, phase: str) -> list[dict[str, Any]]:
    events = json.loads(export(plan, "chrome-trace"))["traceEvents"]
    return [event for event in events if event["ph"] == phase]


@given(
    problems(kinds=("v", "loop", "single"), loop_chunks=(2,)) | differing_problems(),
    st.randoms(use_true_random=True),
)
def test_every_format_for_programs_is_read_back(problem: Problem, random: Random) -> None:
    """PyTorch's formats number microbatches as the last stage runs them, which changes no time."""
    assume(problem.placement.chunks <= 2)  # torchtitan cannot describe more
    plan = random_plan(problem, random)
    timing, (same, renamed) = evaluate(plan.problem, plan.orders), renumbered(plan.problem, plan.orders)
    is_last = (renamed.stage == problem.n_stages - 1) & (renamed.letter == 0)
    assert renamed.microbatch[is_last].tolist() == list(range(problem.microbatches))
    assert np.array_equal(evaluate(same, renamed).end, timing.end)

    for form in ("torch-csv", "torch-comms-csv"):
        read = parse(export(plan, form))
        assert (read.orders, read.placement.rank_of) == (renamed, problem.placement.rank_of)
        assert (read.microbatches, read.pairs, read.renamed) == (problem.microbatches, 0, 0)
        assert (read.communication is not None) == (form == "torch-comms-csv")
    assert [*csv.reader(io.StringIO(export(plan, "torch-csv")))] == renamed.all_text()
    settings, batch = export(plan, "torchtitan"), plan.orders.microbatch[is_last].tolist()
    assert rows_of(settings) == renamed.all_text()
    assert batch_order(plan) == (None if problem.is_equal or batch == sorted(batch) else batch)
    assert (f"#   {', '.join(map(str, batch))}\n" in settings) == (batch_order(plan) is not None)

    events = events_of(plan, "X")
    assert [event["name"] for event in events] == [text for row in plan.orders.all_text() for text in row]
    assert [event["tid"] for event in events] == plan.orders.rank_index().tolist()
    assert [event["ts"] for event in events] == timing.start.tolist()
    assert [event["ts"] + event["dur"] for event in events] == pytest.approx(timing.end.tolist())
    for event in events:
        at = event["args"]
        assert f"{at['stage']}{at['letter']}{at['microbatch']}" == event["name"]
        assert at["chunk"] == problem.placement.chunk_of[at["stage"]]
        assert [at[f"feature {each.name}"] for each in problem.features] == [
            each.value[at["microbatch"]] for each in problem.features
        ]
    held: dict[str, list[float]] = defaultdict(list)
    for event in events_of(plan, "C"):
        held[event["name"]].append(event["args"]["held"])
    for rank, values in enumerate(held.values()):
        assert max(values) == pytest.approx(plan.metrics.peak_memory[rank])
        assert (values[0], values[-1]) == pytest.approx((problem.memory.static[rank],) * 2, abs=1e-9)
    assert list(held) == [f"memory rank {rank}" for rank in range(problem.pp_degree)] or not held
    assert bool(held) == (max(plan.metrics.peak_memory) > 0)


def test_trace_times_are_microseconds_and_threads_are_ranks() -> None:
    for unit, length in {"ns": 0.001, "us": 1, "ms": 1000, "s": 1e6, "ticks": 1, None: 1}.items():
        plan = random_plan(replace(uniform(2, 2), units=Units(time=unit)), Random(1))
        event = events_of(plan, "X")[0]
        assert (event["name"][:2], event["cat"], event["dur"]) == ("0F", "forward", pytest.approx(length))
        threads = [each for each in events_of(plan, "M") if each["name"] == "thread_name"]
        assert {each["tid"]: each["args"]["name"] for each in threads} == {0: "rank 0", 1: "rank 1"}


def test_formats_say_how_to_save_and_serve_them_and_others_are_refused() -> None:
    for name, form in FORMATS.items():
        assert (form.name, form.suffix[0], "/" in form.media_type) == (name, ".", True)
    with pytest.raises(InvalidInput, match=r"'pdf'.*torch-csv, .*chrome-trace, svg, html"):
        export(random_plan(uniform(1, 1), Random(1)), "pdf")
