"""Exports that other programs read: PyTorch's CSV and the Trace Event Format."""

from __future__ import annotations

import csv
import io
import json
from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.torch_lists import torch_runtime
from zbv_solver.errors import InvalidInput
from zbv_solver.export import FORMATS, export
from zbv_solver.export.torch_csv import microbatch_labels
from zbv_solver.plans.orders import Action, Orders
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_problem
from zbv_solver.problem.stages import PlacementKind
from zbv_solver.search.search import SearchOptions, make_plan, search
from zbv_solver.timing.start_times import evaluate, memory_profile


def problem_of(p: int, m: int, placement: PlacementKind = "v", **more: Any) -> Problem:
    return parse_problem(
        {
            "pp_degree": p,
            "microbatches": m,
            "placement": placement,
            "costs": {"forward": 3, "backward_input": 2.5, "backward_weight": 2, "p2p": 0.25},
            **more,
        }
    )


def random_plan(problem: Problem, random: Random) -> Plan:
    """A valid plan: every rank runs any ready action, in any order of microbatches."""
    rank_of, last = problem.placement.rank_of, problem.n_stages - 1
    ranks: list[list[Action]] = [[] for _ in range(problem.pp_degree)]
    ready = [Action(0, "F", j) for j in range(problem.microbatches)]
    while ready:
        action = ready.pop(random.randrange(len(ready)))
        stage, letter, j = action
        ranks[rank_of[stage]].append(action)
        if letter == "F":
            after = Action(stage, random.choice("IB"), j) if stage == last else Action(stage + 1, "F", j)
            ready.append(after)
        if letter in "IB" and stage > 0:
            ready.append(Action(stage - 1, random.choice("IB"), j))
        if letter == "I":
            ready.append(Action(stage, "W", j))
    return make_plan(problem, Orders.from_actions(ranks), method="random")


plans = st.builds(
    lambda p, m, placement, random: random_plan(problem_of(p, m, placement), random),
    st.integers(1, 4),
    st.integers(1, 5),
    st.sampled_from(["v", "loop", "single"]),
    st.randoms(use_true_random=True),
)


def read_csv(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text)))


# --- formats in general


def test_an_unknown_format_is_refused_with_the_known_ones() -> None:
    plan = random_plan(problem_of(1, 1), Random(0))
    with pytest.raises(InvalidInput, match=r"'pdf'.*torch-csv, .*chrome-trace, svg, html"):
        export(plan, "pdf")


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_says_how_to_save_and_serve_it(name: str) -> None:
    entry = FORMATS[name]
    assert entry.name == name
    assert entry.suffix.startswith(".")
    assert "/" in entry.media_type
    assert entry.description


# --- CSV for PyTorch


@given(plans)
def test_csv_reads_back_to_the_same_orders_up_to_the_names_of_microbatches(plan: Plan) -> None:
    read = Orders.from_text(read_csv(export(plan, "torch-csv")))

    label = microbatch_labels(plan.orders, plan.problem.n_stages)
    assert sorted(label.tolist()) == list(range(plan.problem.microbatches))
    assert np.array_equal(read.stage, plan.orders.stage)
    assert np.array_equal(read.letter, plan.orders.letter)
    assert np.array_equal(read.offset, plan.orders.offset)
    assert np.array_equal(read.microbatch, label[plan.orders.microbatch])


@given(plans)
def test_csv_runs_the_last_stages_forwards_in_ascending_order(plan: Plan) -> None:
    read = Orders.from_text(read_csv(export(plan, "torch-csv")))
    last = plan.problem.n_stages - 1
    ran = [a.microbatch for r in range(read.pp_degree) for a in read.actions(r) if a[:2] == (last, "F")]
    assert ran == list(range(plan.problem.microbatches))


@given(plans)
def test_relabelling_changes_no_time(plan: Plan) -> None:
    read = Orders.from_text(read_csv(export(plan, "torch-csv")))
    assert np.array_equal(evaluate(plan.problem, read).end, evaluate(plan.problem, plan.orders).end)


def test_csv_has_one_plain_row_per_rank() -> None:
    text = export(random_plan(problem_of(3, 2), Random(1)), "torch-csv")
    assert text.endswith("\n")
    assert len(text.splitlines()) == 3
    assert " " not in text
    assert ",," not in text
    assert not any(line.endswith(",") for line in text.splitlines())


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 5),
    st.sampled_from(["v", "single"]),
    st.randoms(use_true_random=True),
)
def test_pytorch_loads_and_lowers_the_csv(
    tmp_path_factory: pytest.TempPathFactory, p: int, m: int, placement: PlacementKind, random: Random
) -> None:
    plan = random_plan(problem_of(p, m, placement), random)
    path = tmp_path_factory.mktemp("csv") / "plan.csv"
    path.write_text(export(plan, "torch-csv"))
    for rank in range(p):
        runtime = torch_runtime(plan.problem, rank)
        runtime._load_csv(str(path), format="compute_only")

        rank_of = dict(enumerate(plan.problem.placement.rank_of))
        assert runtime.stage_index_to_group_rank == rank_of
        compute = [str(a) for a in runtime.pipeline_order_with_comms[rank] if a.is_compute_op]
        assert compute == read_csv(path.read_text())[rank]


def test_pytorch_loads_a_plan_that_was_searched(tmp_path: Path) -> None:
    plan = search(problem_of(4, 8), SearchOptions(effort="quick"))
    path = tmp_path / "plan.csv"
    path.write_text(export(plan, "torch-csv"))
    runtime = torch_runtime(plan.problem, 0)
    runtime._load_csv(str(path), format="compute_only")
    sends = [a for a in runtime.pipeline_order_with_comms[0] if "SEND" in str(a)]
    assert len(sends) == 2 * 8  # rank 0 of a V sends activations of stage 0 and gradients of stage 7


# --- Trace Event Format


def trace_of(plan: Plan) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(export(plan, "chrome-trace"))
    return document


def of_phase(document: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in document["traceEvents"] if event["ph"] == phase]


@given(plans)
def test_trace_has_every_action_at_its_time(plan: Plan) -> None:
    timing = evaluate(plan.problem, plan.orders)
    events = of_phase(trace_of(plan), "X")

    assert [event["name"] for event in events] == [t for texts in plan.orders.all_text() for t in texts]
    assert [event["ts"] for event in events] == timing.start.tolist()
    assert [event["ts"] + event["dur"] for event in events] == pytest.approx(timing.end.tolist())
    assert [event["tid"] for event in events] == plan.orders.rank_index().tolist()


def test_trace_events_name_their_action() -> None:
    event = of_phase(trace_of(random_plan(problem_of(2, 1), Random(3))), "X")[0]
    assert event["name"] == "0F0"
    assert event["args"] == {"stage": 0, "chunk": 0, "microbatch": 0, "letter": "F"}
    assert event["cat"] == "forward"


def test_trace_names_one_thread_per_rank() -> None:
    events = of_phase(trace_of(random_plan(problem_of(3, 2), Random(4))), "M")
    named = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert named == {0: "rank 0", 1: "rank 1", 2: "rank 2"}


@pytest.mark.parametrize(
    ("unit", "microseconds"), [("ns", 0.003), ("us", 3), ("ms", 3000), ("s", 3e6), ("ticks", 3), (None, 3)]
)
def test_trace_times_are_microseconds(unit: str | None, microseconds: float) -> None:
    units: dict[str, Any] = {} if unit is None else {"units": {"time": unit}}
    plan = random_plan(problem_of(1, 1, **units), Random(5))
    assert of_phase(trace_of(plan), "X")[0]["dur"] == pytest.approx(microseconds)


def test_trace_counts_the_memory_of_every_rank() -> None:
    memory = {"forward": 2, "backward_input": 0.5, "backward_weight": -2.5, "static": [1, 4]}
    plan = random_plan(problem_of(2, 3, memory=memory), Random(6))
    held: dict[str, list[float]] = defaultdict(list)
    for event in of_phase(trace_of(plan), "C"):
        held[event["name"]].append(event["args"]["held"])

    during, _ = memory_profile(plan.problem, plan.orders)
    for rank, static in enumerate((1, 4)):
        values = held[f"memory rank {rank}"]
        assert values[0] == values[-1] == static
        assert max(values) == max(during[plan.orders.slice_of(rank)]) == plan.metrics.peak_memory[rank]


def test_trace_of_a_problem_without_memory_has_no_counters() -> None:
    assert of_phase(trace_of(random_plan(problem_of(2, 2), Random(7))), "C") == []
