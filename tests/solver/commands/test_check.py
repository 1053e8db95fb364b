"""``zbv check`` of plans, and of schedules that PyTorch and other programs wrote."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support.problems import uniform_document
from support.torch_lists import loaded_lists, torch_runtime
from torch.distributed.pipelining import schedules as torch_schedules
from zbv_models.fixed_orders.schedules import torch_schedule
from zbv_solver.commands.cli import main
from zbv_solver.export import export
from zbv_solver.export.torch_csv import parse
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.assemble import baseline_plan
from zbv_solver.timing.start_times import evaluate

Check = Callable[..., tuple[int, str]]
COSTS = {"forward": 1, "backward_input": 1.5, "backward_weight": 0.5, "p2p": 0.25}
MEMORY = {"forward": 2, "backward_input": -1, "backward_weight": -1}
SPLIT_AS_B = """\
0F0,0F1,2F0,,2F1,2B0,2W0,2B1,2W1,0B0,0W0,0B1,0W1
,1F0,1F1,3F0,3B0,3F1,3B1,3W0,1B0,3W1,1B1,1W0,1W1
"""
"""Two ranks of interleaved ZB1P as versions before 2.6 wrote it: ``B`` is the gradient of the input."""
BLOCK = {"name": "block", "forward": 1, "backward_input": 1, "backward_weight": 1}


def document(p: int, m: int, placement: str) -> dict[str, Any]:
    return uniform_document(p, m) | {"placement": placement, "costs": COSTS, "memory": MEMORY}


def dumped(name: str, problem: Problem, path: Path, communication: bool) -> Path:
    """A schedule as PyTorch writes it, with its own ``_dump_csv`` if there is communication."""
    runtime, is_single = torch_runtime(problem, 0, loss_fn=Mock()), name == "1F1B"
    runtime.stage_index_to_group_rank = dict(enumerate(problem.placement.rank_of))
    stages = runtime._stages[0] if is_single else runtime._stages
    made: Any = torch_schedules.get_schedule_class(name)(stages, problem.microbatches, loss_fn=Mock())
    order = made._get_pipeline_order() if is_single else made.pipeline_order
    with path.open("w", newline="") as file:
        for rank in range(problem.pp_degree):
            csv.writer(file).writerow(["" if action is None else action for action in order[rank]])
    if communication:
        runtime._load_csv(str(path))
        runtime._dump_csv(str(path))
    return path


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    """Run ``zbv check SCHEDULE --problem PROBLEM``; returns the exit status and what it printed."""

    def run(schedule: str | Path, problem: object, *flags: str) -> tuple[int, str]:
        path = schedule if isinstance(schedule, Path) else tmp_path / "given.csv"
        if isinstance(schedule, str):
            path.write_text(schedule)
        (tmp_path / "problem.json").write_text(json.dumps(problem))
        status = main(["check", str(path), "--problem", f"{tmp_path}/problem.json", *flags])
        shown = capsys.readouterr()
        return status, shown.out + shown.err

    return run


NAMES = ("Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS", "ZBVZeroBubble", "DualPipeV")


@pytest.mark.parametrize(
    ("name", "p", "m", "communication"),
    [(name, 4, 8, communication) for name in NAMES for communication in (False, True)]
    + [("1F1B", p, m, False) for p, m in ((1, 3), (2, 2), (4, 8))],
)
def test_a_schedule_of_pytorch_is_valid_and_has_the_times_of_its_order(
    name: str, p: int, m: int, communication: bool, tmp_path: Path, check: Check
) -> None:
    """The last rank of PyTorch's own 1F1B counts forwards from 1."""
    order = torch_schedule(name, p, m)
    given = document(p, m, order.placement.kind)
    path = dumped(name, parse_problem(given), tmp_path / "schedule.csv", communication)
    assert (f"{p - 1}F{m}" in path.read_text()) == (name == "1F1B")
    status, shown = check(path, given, "--json")
    assert status == 0, shown
    found, expected = json.loads(shown), evaluate(parse_problem(given), order.orders())
    for metric in ("span", "makespan", "bubble_rate"):
        assert found["metrics"][metric] == pytest.approx(getattr(expected, metric))
    assert found["metrics"]["peak_memory"] == pytest.approx(list(expected.peak_memory))
    verified, others = (
        "; ".join(claim["text"] for claim in found["claims"] if claim["is_verified"] == is_verified)
        for is_verified in (True, False)
    )
    # The file of a single rank looks as if it had all communication, without reductions.
    assert ("every tensor is sent and received in order" in verified) == (communication or p == 1)
    assert ("losses and reductions come in the order that PyTorch's runtime needs" in verified) == (p > 1)
    assert ("overlap" in others, "1, 2, …" in others) == (name == "DualPipeV", name == "1F1B")


def test_pairs_are_written_as_pytorch_reads_them_and_timed_if_the_problem_has_communication(
    tmp_path: Path, check: Check
) -> None:
    communication = dict.fromkeys(("forward", "backward_input", "backward"), 0.5)
    given = document(4, 8, "v") | {"costs": COSTS | {"communication": communication}}
    problem = parse_problem(given)
    written = export(baseline_plan("dualpipe-v", problem), "torch-csv")
    own = dumped("DualPipeV", problem, tmp_path / "schedule.csv", communication=False).read_text()
    assert parse(written).orders.without_pairs() == parse(own).orders.without_pairs()
    # The parser of PyTorch adds the communication.
    runtime = torch_runtime(problem, 0, loss_fn=Mock())
    (tmp_path / "ours.csv").write_text(written)
    runtime._load_csv(str(tmp_path / "ours.csv"), format="compute_only")
    assert "OVERLAP_F_B" in str(loaded_lists(runtime))
    for schedule in (written, own):
        status, shown = check(schedule, given, "--json")
        found = json.loads(shown)
        assert status == 0
        assert {"pairs of F and B overlap": True}.items() <= {
            claim["text"].lstrip("0123456789 "): claim["is_verified"] for claim in found["claims"]
        }.items()
        assert found["metrics"]["span"] == evaluate(problem, parse(schedule).orders).span
        assert found["metrics"]["span"] < baseline_plan("dualpipe-v", problem.without_pairs()).metrics.span
    # Who lists the backward first means the same.
    turned = re.sub(r"\(([^;]*);([^)]*)\)", r"(\2;\1)", written)
    assert parse(turned).orders == parse(written).orders


@pytest.mark.parametrize(("text", "unverified", "words"), [
    (SPLIT_AS_B, "8 B with a separate W are I", "\nspan 15 units, makespan 15 units,"),
    (SPLIT_AS_B.replace("B", "I"), "", "\nspan 15 units, makespan 15 units,"),
    # Without reductions, newer versions would not divide gradients.
    ("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", "0REDUCE_GRAD", ""),
    # PyTorch writes reductions of 1F1B and GPipe without transfers, which is no communication.
    ("0F0,0F1,0B0,0B1,0REDUCE_GRAD\n1F0,1B0,1F1,1B1,1REDUCE_GRAD\n", "", "memory 4 units on rank 0"),
])  # fmt: skip
def test_partial_files_say_what_is_unverified(text: str, unverified: str, words: str, check: Check) -> None:
    status, shown = check(text, document(2, 1 + ("F1" in text), "loop" if "2F0" in text else "single"))
    assert status == 0, shown
    assert unverified in shown.partition("not verified:")[2]
    assert ("every tensor is sent" in shown) == ("SEND" in text)
    assert words in shown


@pytest.mark.parametrize("text", ["0F0,0BW0,0F1,0B1,0W1", "\ufeff0F0,0B0,0F1,0I1,0W1\n"])
def test_old_names_and_the_mark_of_other_editors_are_read(text: str) -> None:
    assert parse(text).orders.all_text() == [["0F0", "0B0", "0F1", "0I1", "0W1"]]


@pytest.mark.parametrize(("text", "words"), [
    ("", "found 0 stages on 0 ranks"),
    ("rank,actions\n0F0,0B0\n1F0,1B0", "row 1, entry 1: found 'rank'"),
    ("0F0,0B0,0F1x", "row 1, entry 3: found '0F1x'"),
    ("0F0,(0F1;0F0)OVERLAP_F_B", "row 1, entry 2"),
    ("0F0,0B0\n\n1F0,1B0", "every rank has equally many"),
    ("0F0,0B0\n0F1,0B1", "every stage is on one rank"),
    ("0F0,0B0\n7F0,7B0", "numbered from 0"),
    ("1F0,1B0\n0F0,0B0", "one stage per rank"),
    ("0F0,0B0\n1F0,1B0\n2F0,2B0", "found 3 ranks and 1 microbatches, numbered from 0; the problem has 2"),
    ("0F0,0F1,0B0,0B1\n1F2,1B0,1F1,1B1\n", "found 2 ranks and 3 microbatches"),
    ("0F0,2F0,0B0,2B0\n1F0,3F0,1B0,3B0", "found 4 stages with placement loop"),
    ("0F0,0B0\n1B0,1F0", "1B0 comes before 1F0"),
    ("0F0\n1F0,1B0", "stage 0 microbatch 0 has 1 F, 0 I, 0 W, 0 B"),
    ("0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0", "0SEND_F0 has only one end"),
    ("0RECV_B0,0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0", "one order"),
])  # fmt: skip
def test_a_wrong_schedule_is_refused_with_its_place_and_the_rule(text: str, words: str, check: Check) -> None:
    status, shown = check(text, document(2, 1, "single"))
    assert (status, "given.csv: " in shown, words in shown) == (2, True, True), shown


def test_the_limit_and_the_rules_of_layers_hold_for_schedules(check: Check) -> None:
    full = {**document(1, 2, "single"), "memory": {**MEMORY, "limit": 3}}
    assert "rank 0 needs 4 of memory; its limit is 3" in check("0F0,0F1,0B0,0B1", full)[1]
    layers = {"pp_degree": 2, "microbatches": 2, "layers": [{**BLOCK, "repeat": 6}], "placement": "auto"}
    status, shown = check("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", {**layers, "cut": {"first": 2, "last": 2}})
    assert (status, "problem.json: /cut: found first 2 and last 2 on 2 ranks" in shown) == (2, True)


def test_layers_get_the_best_cut_for_a_schedule(tmp_path: Path, check: Check, capsys: Any) -> None:
    """The head is as long as two blocks: with one block less in its stage, all stages are equal."""
    head = {"name": "head", "forward": 2, "backward_input": 2, "backward_weight": 2}
    layers = {"pp_degree": 4, "microbatches": 8, "placement": "auto"}
    layers |= {"layers": [{**BLOCK, "repeat": 14}, head]}
    made, looped = tmp_path / "plan.json", parse_problem(document(4, 8, "loop"))
    path = dumped("Interleaved1F1B", looped, tmp_path / "schedule.csv", True)
    status, shown = check(path, layers, "-o", str(made))
    assert (status, "layers per stage: 2 2 2 2 2 2 2 1" in shown) == (0, True), shown
    assert main(["simulate", str(made), "--scenarios", "32"]) == 0
    assert f"schedule {tmp_path}"[:30] in capsys.readouterr().out, "a plan has the name of its schedule"


def test_a_plan_without_metrics_gets_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    plan = {"problem": document(1, 2, "single"), "ranks": [["0F0", "0B0", "0F1", "0B1"]]}
    path.write_text(json.dumps(plan))
    assert main(["check", str(path)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("valid\nspan 6 units, makespan 6 units, bubble rate 0.00\u202f%\n")
    assert "peak memory 2 units on rank 0" in shown
    assert main(["simulate", str(path), "--scenarios", "32"]) == 0
    table = capsys.readouterr().out
    assert ("this plan" in table, "zbv" in table) == (True, False)
