"""Exports that other programs read: read back, they are the plan."""

from __future__ import annotations

import csv
import io
import json
from collections import defaultdict
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.orders import random_orders
from support.problems import problems
from support.titan_configuration import rows_of
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


def plan_of(text: list[list[str]], placement: str = "v", **more: Any) -> Plan:
    microbatches = len({action.partition("F")[2] for row in text for action in row if "F" in action})
    sizes = {"pp_degree": len(text), "microbatches": microbatches, "placement": placement}
    problem = parse_problem({**sizes, "costs": COSTS, **more})
    return make_plan(problem, Orders.from_text(text), method="by hand")


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
