"""``zbv check`` of plans, and of schedules that PyTorch and other programs wrote."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules as torch_schedules
from zbv_models.fixed_orders.schedules import torch_schedule
from zbv_solver.commands.cli import main
from zbv_solver.export.torch_csv import parse
from zbv_solver.problem.reading import parse_problem
from zbv_solver.problem.stages import Placement
from zbv_solver.timing.start_times import evaluate

Capture = pytest.CaptureFixture[str]
KINDS = {"ZBVZeroBubble": "v", "DualPipeV": "v"}
SPLIT_AS_B = """\
0F0,0F1,2F0,,2F1,2B0,2W0,2B1,2W1,0B0,0W0,0B1,0W1
,1F0,1F1,3F0,3B0,3F1,3B1,3W0,1B0,3W1,1B1,1W0,1W1
"""
"""Two ranks of interleaved ZB1P as versions before 2.6 wrote it: ``B`` is the gradient of the input."""


def document(p: int, m: int, placement: str, **more: Any) -> dict[str, Any]:
    costs = {"forward": 1, "backward_input": 1.5, "backward_weight": 0.5, "p2p": 0.25}
    memory = {"forward": 2, "backward_input": -1, "backward_weight": -1}
    return {
        "pp_degree": p,
        "microbatches": m,
        "placement": placement,
        "costs": costs,
        "memory": memory,
        **more,
    }


def dumped(name: str, p: int, m: int, folder: Path, communication: bool) -> Path:
    """A schedule as PyTorch's own ``_dump_csv`` writes it."""
    placement = Placement.of("v" if name in KINDS else "loop", p)
    stages: list[Any] = [
        SimpleNamespace(
            stage_index=stage, num_stages=2 * p, group_size=p, group_rank=0, group=None, has_backward=False,
            is_first=stage == 0, is_last=stage == 2 * p - 1, submod=torch.nn.Identity(),
            device=torch.device("cpu"), stage_index_to_group_rank=dict(enumerate(placement.rank_of)),
        )
        for stage in placement.stages_of[0]
    ]  # fmt: skip
    made = torch_schedules.get_schedule_class(name)(stages, m, loss_fn=lambda output, target: output)
    path = folder / "schedule.csv"
    with path.open("w", newline="") as file:
        for rank in made.pipeline_order:
            csv.writer(file).writerow(["" if a is None else a for a in made.pipeline_order[rank]])
    if communication:
        runtime: Any = torch_schedules._PipelineScheduleRuntime(  # type: ignore[no-untyped-call]
            stages, m, loss_fn=lambda output, target: output
        )
        runtime.stage_index_to_group_rank = dict(enumerate(placement.rank_of))
        runtime._load_csv(str(path))
        runtime._dump_csv(str(path))
    return path


@pytest.fixture
def check(tmp_path: Path, capsys: Capture) -> Callable[..., tuple[int, str]]:
    """Run ``zbv check SCHEDULE --problem PROBLEM``; returns the exit status and what it printed."""

    def run(schedule: str | Path, problem: object, *flags: str) -> tuple[int, str]:
        path = schedule if isinstance(schedule, Path) else tmp_path / "given.csv"
        if isinstance(schedule, str):
            path.write_text(schedule)
        of = tmp_path / "problem.json"
        of.write_text(json.dumps(problem))
        status = main(["check", str(path), "--problem", str(of), *flags])
        shown = capsys.readouterr()
        return status, shown.out + shown.err

    return run


# --- schedules of PyTorch


@pytest.mark.parametrize("communication", [False, True])
@pytest.mark.parametrize(
    "name", ["Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS", "ZBVZeroBubble", "DualPipeV"]
)
def test_a_schedule_of_pytorch_is_valid_and_has_the_times_of_its_order(
    name: str, communication: bool, tmp_path: Path, check: Callable[..., tuple[int, str]]
) -> None:
    given = document(4, 8, KINDS.get(name, "loop"))
    status, shown = check(dumped(name, 4, 8, tmp_path, communication), given, "--json")
    assert status == 0, shown
    found = json.loads(shown)
    expected = evaluate(parse_problem(given), torch_schedule(name, 4, 8).orders())
    for metric in ("span", "makespan", "bubble_rate"):
        assert found["metrics"][metric] == pytest.approx(getattr(expected, metric))
    assert found["metrics"]["peak_memory"] == pytest.approx(list(expected.peak_memory))
    verified = {claim["text"] for claim in found["claims"] if claim["is_verified"]}
    assert ("every tensor is sent and received in order" in verified) == communication
    assert "losses and reductions come in the order that PyTorch's runtime needs" in verified
    pairs = [claim["text"] for claim in found["claims"] if "overlap" in claim["text"]]
    assert bool(pairs) == (name == "DualPipeV")


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (4, 8)])
def test_the_last_rank_of_pytorchs_own_1f1b_counts_forwards_from_1(
    p: int, m: int, check: Callable[..., tuple[int, str]]
) -> None:
    stage: Any = SimpleNamespace(
        stage_index=0, num_stages=p, group_size=p, group_rank=0, group=None, has_backward=False,
        is_first=True, is_last=p == 1, submod=torch.nn.Identity(), device=torch.device("cpu"),
    )  # fmt: skip
    order = torch_schedules.Schedule1F1B(
        stage, m, loss_fn=lambda output, target: output
    )._get_pipeline_order()
    assert order is not None
    rows = [",".join("" if action is None else str(action) for action in order[rank]) for rank in range(p)]
    assert f"{p - 1}F{m}" in rows[-1]
    given = document(p, m, "single")
    status, shown = check("\n".join(rows) + "\n", given, "--json")
    assert status == 0, shown
    found = json.loads(shown)
    expected = evaluate(parse_problem(given), torch_schedule("1F1B", p, m).orders())
    assert found["metrics"]["span"] == pytest.approx(expected.span)
    assert any("1, 2, …" in claim["text"] and not claim["is_verified"] for claim in found["claims"])


def test_other_forwards_from_1_are_refused(check: Callable[..., tuple[int, str]]) -> None:
    """Nobody knows which microbatches they are."""
    status, _ = check("0F0,0F1,0B0,0B1\n1F2,1B0,1F1,1B1\n", document(2, 2, "single"))
    assert status == 2


def test_a_backward_next_to_a_weight_gradient_is_that_of_the_input(
    check: Callable[..., tuple[int, str]],
) -> None:
    status, shown = check(SPLIT_AS_B, document(2, 2, "loop"))
    assert status == 0
    assert "8 B with a separate W are I" in shown
    assert (
        check(SPLIT_AS_B.replace("B", "I"), document(2, 2, "loop"))[1].splitlines()[1:4]
        == (shown.splitlines()[1:4])
    )


def test_a_full_backward_of_old_files_is_read() -> None:
    assert parse("0F0,0BW0,0F1,0B1,0W1").orders.all_text() == [["0F0", "0B0", "0F1", "0I1", "0W1"]]


def test_the_mark_of_other_editors_before_the_text_is_ignored() -> None:
    assert parse("\ufeff0F0,0B0").orders.all_text() == [["0F0", "0B0"]]


def test_the_sums_of_gradients_need_a_reduction(check: Callable[..., tuple[int, str]]) -> None:
    """Files of old versions have communication and no reductions: newer ones would not divide gradients."""
    one = "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"
    status, shown = check(one, document(2, 1, "single"))
    assert status == 0
    assert "0REDUCE_GRAD" in shown.partition("not verified:")[2]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "found 0 stages on 0 ranks"),
        ("rank,actions\n0F0,0B0\n1F0,1B0", "row 1, entry 1: found 'rank'"),
        ("0F0,0B0,hello", "row 1, entry 3: found 'hello'"),
        ("0F0,0B0,0F1x", "row 1, entry 3: found '0F1x'"),
        ("0F0,(0F1;0F0)OVERLAP_F_B", "row 1, entry 2"),
        ("0F0,0B0\n\n1F0,1B0", "every rank has equally many"),
        ("0F0,0B0\n0F1,0B1", "every stage is on one rank"),
        ("0F0,0B0\n7F0,7B0", "numbered from 0"),
        ("1F0,1B0\n0F0,0B0", "one stage per rank"),
        (
            "0F0,0B0\n1F0,1B0\n2F0,2B0",
            "found 3 ranks and 1 microbatches, numbered from 0; the problem has 2 and 1",
        ),
        ("0F0,2F0,0B0,2B0\n1F0,3F0,1B0,3B0", "found 4 stages with placement loop"),
        ("0F0,0B0\n1B0,1F0", "1B0 comes before 1F0"),
        ("0F0\n1F0,1B0", "stage 0 microbatch 0 has 1 F, 0 I, 0 W, 0 B"),
        ("0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0", "0SEND_F0 has only one end"),
        ("0RECV_B0,0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0", "one order"),
    ],
)
def test_a_wrong_schedule_is_refused_with_its_place_and_the_rule(
    text: str, said: str, check: Callable[..., tuple[int, str]]
) -> None:
    status, shown = check(text, document(2, 1, "single"))
    assert status == 2
    assert "given.csv: " in shown
    assert said in shown


def test_a_schedule_beyond_the_memory_limit_is_refused(check: Callable[..., tuple[int, str]]) -> None:
    problem = document(1, 2, "single")
    problem["memory"]["limit"] = 3
    status, shown = check("0F0,0F1,0B0,0B1", problem)
    assert status == 2
    assert "rank 0 needs 4 of memory; its limit is 3" in shown


def test_a_reduction_without_transfers_is_no_communication(check: Callable[..., tuple[int, str]]) -> None:
    """PyTorch writes 1F1B and GPipe like that."""
    schedule = "0F0,0F1,0B0,0B1,0REDUCE_GRAD\n1F0,1B0,1F1,1B1,1REDUCE_GRAD\n"
    status, shown = check(schedule, document(2, 2, "single"))
    assert status == 0, shown
    assert "every tensor is sent" not in shown


# --- layers


def test_a_rule_that_the_layers_break_names_their_file(check: Callable[..., tuple[int, str]]) -> None:
    block = {"name": "block", "repeat": 6, "forward": 1, "backward_input": 1, "backward_weight": 1}
    layers = {"pp_degree": 2, "microbatches": 2, "layers": [block], "cut": {"first": 2, "last": 2}}
    status, shown = check("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", {**layers, "placement": "auto"})
    assert status == 2
    assert "problem.json: /cut: found first 2 and last 2 on 2 ranks" in shown


def test_layers_get_the_best_cut_for_the_order_of_a_schedule(
    tmp_path: Path, check: Callable[..., tuple[int, str]], capsys: Capture
) -> None:
    """The head is as long as two blocks: with one block less in its stage, all stages are equal."""
    block = {"name": "block", "repeat": 14, "forward": 1, "backward_input": 1, "backward_weight": 1}
    head = {"name": "head", "forward": 2, "backward_input": 2, "backward_weight": 2}
    layers = {"pp_degree": 4, "microbatches": 8, "placement": "auto", "layers": [block, head]}
    made = tmp_path / "plan.json"
    status, shown = check(dumped("Interleaved1F1B", 4, 8, tmp_path, True), layers, "-o", str(made))
    assert status == 0, shown
    assert "layers per stage: 2 2 2 2 2 2 2 1" in shown
    assert main(["check", str(made)]) == 0  # the plan names its own problem
    # Another program takes the plan under the name of the schedule.
    capsys.readouterr()
    assert main(["simulate", str(made), "--scenarios", "32"]) == 0
    assert f"schedule {tmp_path / 'schedule.csv'}"[:30] in capsys.readouterr().out


# --- plans


def test_a_plan_without_metrics_gets_them(tmp_path: Path, capsys: Capture) -> None:
    plan = {"problem": document(1, 2, "single"), "ranks": [["0F0", "0B0", "0F1", "0B1"]]}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    assert main(["check", str(tmp_path / "plan.json")]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("valid\nspan 6, makespan 6, bubble rate 0.00%\n")
    assert "peak memory 2 on rank 0" in shown
    assert main(["simulate", str(tmp_path / "plan.json"), "--scenarios", "32"]) == 0
    table = capsys.readouterr().out
    assert "this plan" in table
    assert "zbv" not in table


def test_a_schedule_needs_a_problem_and_takes_one(tmp_path: Path, capsys: Capture) -> None:
    schedule, problem = tmp_path / "schedule.csv", tmp_path / "problem.json"
    schedule.write_text("0F0,0B0")
    problem.write_text(json.dumps(document(1, 1, "single")))
    assert main(["check", str(schedule)]) == 2
    assert "Give its problem: --problem FILE" in capsys.readouterr().err
    assert main(["check", str(problem), str(schedule)]) == 0
    assert main(["check", str(problem), str(schedule), "--problem", str(problem)]) == 2
    assert "found two problems" in capsys.readouterr().err
