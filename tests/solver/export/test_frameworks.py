"""Exports for torchtitan and for Megatron-LM's zero-bubble fork: read back, they are the plan."""

from __future__ import annotations

import json
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.layered import NAMES, RECOMPUTED
from support.orders import random_orders
from support.problems import problems, uniform
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)
from zbv_solver.errors import InvalidInput, InvalidPlan
from zbv_solver.export import export
from zbv_solver.export.torch_csv import relabelled
from zbv_solver.plans.orders import Action, Orders
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_any_problem, parse_problem
from zbv_solver.search.search import make_plan
from zbv_solver.timing.start_times import evaluate
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
    rows = [line[5:] for line in export(plan, "torchtitan").splitlines() if line.startswith("#csv ")]
    orders = Orders.from_text([row.split(",") for row in rows])
    assert orders == renamed(plan)
    verify_orders(plan.problem, orders)


@given(plans)
def test_the_settings_fit_the_plan(plan: Plan) -> None:
    settings = tomllib.loads(export(plan, "torchtitan"))
    parallelism, problem = settings["parallelism"], plan.problem
    assert parallelism["pipeline_parallel_degree"] == problem.pp_degree
    microbatch = parallelism["pipeline_parallel_microbatch_size"]
    assert settings["training"]["local_batch_size"] == microbatch * problem.microbatches
    assert parallelism["pipeline_parallel_schedule_csv"] == f"plan-{plan.plan_id[:12]}.csv"

    cut_by = get_schedule_class(parallelism["pipeline_parallel_schedule"])
    assert (cut_by is ScheduleZBVZeroBubble) == (problem.placement.kind == "v")
    assert issubclass(cut_by, PipelineScheduleSingle) == (problem.placement.chunks == 1)


def test_a_split_backward_turns_off_what_cannot_be_split() -> None:
    split = plan_of([["0F0", "0F1", "1F0", "1I0", "1F1", "1W0", "1B1", "0B0", "0B1"]])
    fused = plan_of([["0F0", "0F1", "1F0", "1B0", "1F1", "1B1", "0B0", "0B1"]])
    settings = tomllib.loads(export(split, "torchtitan"))
    assert settings["compile"] == {"enable": False}
    assert settings["activation_checkpoint"] == {"mode": "none"}
    assert "compile" not in tomllib.loads(export(fused, "torchtitan"))


def test_the_file_says_how_to_take_the_schedule_out(tmp_path: Path) -> None:
    plan = make_plan(uniform(2, 3), random_orders(uniform(2, 3), Random(0)), method="random")
    path = tmp_path / "plan.toml"
    path.write_text(export(plan, "torchtitan"))
    command = next(line[1:].strip() for line in path.read_text().splitlines() if "sed -n" in line)
    name = tomllib.loads(path.read_text())["parallelism"]["pipeline_parallel_schedule_csv"]
    subprocess.run(
        ["sh", "-c", command.replace("THIS_FILE", path.name)], cwd=tmp_path, timeout=60, check=True
    )
    assert (tmp_path / name).read_text() == export(plan, "torch-csv")


def test_the_flags_say_the_same_as_the_settings() -> None:
    text = export(plan_of([["0F0", "0F1", "1F0", "1I0", "1F1", "1W0", "1B1", "0B0", "0B1"]]), "torchtitan")
    flags = dict([*line[5:].split(" ", 1), ""][:2] for line in text.splitlines() if line.startswith("#   --"))
    expected = {
        f"{section}.{key}" if value is not False else f"{section}.no_{key}": ""
        if value is False
        else str(value)
        for section, entries in tomllib.loads(text).items()
        for key, value in entries.items()
    }
    assert {flag.removeprefix("-"): value for flag, value in flags.items()} == expected


def test_more_than_two_stages_per_rank_are_refused_with_a_way_out() -> None:
    plan = plan_of(
        [["0F0", "1F0", "2F0", "2B0", "1B0", "0B0", "0F1", "1F1", "2F1", "2B1", "1B1", "0B1"]],
        "loop",
        chunks=3,
    )
    with pytest.raises(InvalidInput, match=r"/problem/chunks: found 3.*torch-csv"):
        export(plan, "torchtitan")


def test_stages_are_named_by_layers_and_recomputation_is_noted() -> None:
    cut = {"partition": [NAMES[:2], NAMES[2:4], NAMES[4:6], NAMES[6:]], "memory": {}}
    for flags, is_said in (([False, True, False, True], True), ([False] * 4, False)):
        problem = parse_any_problem({**RECOMPUTED, **cut, "recompute": flags})
        assert isinstance(problem, Problem)
        text = export(make_plan(problem, random_orders(problem, Random(1)), method="random"), "torchtitan")
        assert '#   1: ["block.1", "block.2"]' in text.splitlines()
        assert ("# Planned to be recomputed: 1, 3." in text) == is_said == ("checkpoint yourself" in text)
        tomllib.loads(text)


# --- the zero-bubble fork


@dataclass
class ScheduledNode:
    """The fields that the fork's class of this name has."""

    type: str
    stage: int
    microbatch: int
    chunk: int
    seq_split_idx: int
    layer_group_idx: int
    start_time: float
    completion_time: float
    recv_peer_stage: int | None
    send_peer_stage: int | None


def nodes_of(plan: Plan) -> list[list[ScheduledNode]]:
    document = json.loads(export(plan, "megatron-json"))
    assert document["n_stages"] == plan.problem.pp_degree
    assert document["n_micro"] == plan.problem.microbatches
    assert document["max_chunks"] == plan.problem.placement.chunks
    return [[ScheduledNode(**node) for node in nodes] for nodes in document["nodes"]]


def read_back(nodes: list[list[ScheduledNode]]) -> Orders:
    letters = {"F": "F", "B": "I", "W": "W", "BW": "B"}
    return Orders.from_actions(
        [[Action(n.layer_group_idx, letters[n.type], n.microbatch) for n in rank] for rank in nodes]
    )


def unmixed(orders: Orders) -> list[list[Action]]:
    """By the plain definition: B of a microbatch that is split elsewhere becomes I and W."""
    ranks = [orders.actions(rank) for rank in range(orders.pp_degree)]
    split = {action.microbatch for actions in ranks for action in actions if action.letter == "I"}
    return [
        [
            part
            for action in actions
            for part in (
                (action._replace(letter="I"), action._replace(letter="W"))
                if action.letter == "B" and action.microbatch in split
                else (action,)
            )
        ]
        for actions in ranks
    ]


@given(plans)
def test_nodes_read_back_as_the_orders_of_the_plan(plan: Plan) -> None:
    orders = read_back(nodes_of(plan))
    assert orders == Orders.from_actions(unmixed(renamed(plan)))
    verify_orders(plan.problem, orders)


@given(plans)
def test_nodes_carry_ranks_chunks_and_the_times_of_their_order(plan: Plan) -> None:
    nodes = nodes_of(plan)
    timing = evaluate(plan.problem, read_back(nodes))
    flat = [node for rank in nodes for node in rank]
    assert [node.start_time for node in flat] == timing.start.tolist()
    assert [node.completion_time for node in flat] == timing.end.tolist()
    for rank, found in enumerate(nodes):
        assert {node.stage for node in found} == {rank}
        assert all(plan.problem.placement.stages_of[rank][n.chunk] == n.layer_group_idx for n in found)


@given(plans)
def test_peers_of_nodes_name_each_other(plan: Plan) -> None:
    """Where the fork's communication pass looks for the other end, it is."""
    flat = [node for rank in nodes_of(plan) for node in rank]
    by_key = {(n.type, n.layer_group_idx, n.microbatch): n for n in flat}
    last = plan.problem.n_stages - 1
    for node in flat:
        if node.type == "W":
            assert node.recv_peer_stage is node.send_peer_stage is None
            continue
        before = node.layer_group_idx + (-1 if node.type == "F" else 1)
        if not 0 <= before <= last:
            assert node.recv_peer_stage is None
            continue
        source = by_key[node.type, before, node.microbatch]
        local = source.stage == node.stage
        assert node.recv_peer_stage == (None if local else source.stage)
        assert source.send_peer_stage == (None if local else node.stage)


def test_letters_are_translated_to_the_forks() -> None:
    plan = plan_of([["0F0", "0F1", "1F0", "1F1", "1I0", "1W0", "1B1", "0I0", "0W0", "0B1"]])
    found = [f"{n.layer_group_idx}{n.type}{n.microbatch}" for n in nodes_of(plan)[0]]
    assert found == ["0F0", "0F1", "1F0", "1F1", "1B0", "1W0", "1BW1", "0B0", "0W0", "0BW1"]


def test_a_mixed_backward_that_the_memory_limit_forbids_is_refused() -> None:
    """B, written as B and W in succession, holds what an I holds; here that grows."""
    memory = {"forward": 1, "backward_input": 1, "backward_weight": -2, "limit": 4}
    text = [["0F0", "0F1", "1F0", "1F1", "1B0", "1B1", "0I0", "0W0", "0B1"]]
    plan = plan_of(text, memory=memory)
    with pytest.raises(InvalidPlan, match=r"rank 0 needs 5 of memory; its limit is 4"):
        export(plan, "megatron-json")
