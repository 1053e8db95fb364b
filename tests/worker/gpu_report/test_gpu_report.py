"""The report on a node's GPUs: its arithmetic and judgements, and every check that a CPU can run."""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import pytest
import torch
from support.paths import ROOT
from zbv_solver.plans.orders import Action
from zbv_solver.problem.stages import Placement
from zbv_solver.verify.verifier import verify_orders
from zbv_worker.commands.cli import main
from zbv_worker.execution.step import StepResult
from zbv_worker.execution.timeline import Record
from zbv_worker.gpu_report import communicator, gpu_report, pipeline, replicas, streams
from zbv_worker.gpu_report.check import (
    Check,
    Line,
    Needs,
    ReportOptions,
    at_most,
    failed,
    passed,
)
from zbv_worker.gpu_report.checks import CHECKS
from zbv_worker.gpu_report.facts import environment_of, judge_facts, lacking_fields
from zbv_worker.gpu_report.gpu_report import run_check
from zbv_worker.gpu_report.page import UNPROVED_PAGE
from zbv_worker.gpu_report.rank import host_waits, relative_error, v_orders
from zbv_worker.measure.profile.profile import LinkProfile
from zbv_worker.measure.ranks import equal_stages
from zbv_worker.model.spec import ModelSpec
from zbv_worker.tracing.merged_trace import RankTrace

GPT = {"layers": 4, "width": 32, "heads": 2, "length": 32, "sequences": 2, "characters": 20_000}
SMALL = ReportOptions(ModelSpec("zbv_worker.models.gpt:gpt", GPT), "cpu", microbatches=3, repeats=2, steps=2)
US = 1000
LINKS = {(0, 1): LinkProfile(0, 1, (), latency=10e-6, bandwidth=1e9)}


def received(wait: int, start: int) -> list[RankTrace]:
    """Stage 0's F of rank 0 ends at 100 us; stage 1's on rank 1 receives 10,000 bytes: 20 us."""
    sent = Record(Action(0, "F", 0), 0, 0, 100 * US)
    received = Record(Action(1, "F", 0), wait * US, start * US, 200 * US, 10_000)
    return [
        RankTrace.of("plan", rank, [StepResult(0, {}, (record,))])
        for rank, record in enumerate((sent, received))
    ]


@pytest.mark.parametrize(
    ("wait", "start", "exposed", "hidden"),
    [
        (150, 150, 0, 1.0),  # busy until after the arrival
        (110, 120, 10, 0.5),  # waits for the last 10 of 20 us
        (50, 120, 20, 0.0),  # waits 50 us for the sender, then for the whole transfer
        (50, 140, 40, 0.0),  # a slow transfer: waits for all 40 us
    ],
)
def test_a_transfer_is_exposed_where_its_receiver_waits_after_it_was_sent(
    wait: int, start: int, exposed: int, hidden: float
) -> None:
    (found,) = pipeline.overlaps(received(wait, start), LINKS)
    assert (found.stage, found.count) == (1, 1)
    assert found.exposed * 1e6 == pytest.approx(exposed)
    assert found.hidden == pytest.approx(hidden)


@pytest.mark.parametrize(("p", "microbatches"), [(2, 1), (2, 8), (3, 5), (4, 8)])
def test_the_reports_own_plan_is_valid_and_splits_every_backward(p: int, microbatches: int) -> None:
    problem = equal_stages(Placement.of("v", p), microbatches)
    orders = v_orders(problem)
    verify_orders(problem, orders)
    assert len(orders) == 3 * problem.n_stages * microbatches


def test_a_step_lasts_from_last_end_to_last_end() -> None:
    def trace(rank: int, *ends: int) -> RankTrace:
        steps = [StepResult(0, {}, (Record(Action(rank, "F", 0), 0, 0, end),)) for end in ends]
        return RankTrace.of("plan", rank, steps)

    assert pipeline.step_seconds([trace(0, 5, 10, 99), trace(1, 7, 27, 49)]) == pytest.approx(46e-9)


def test_every_check_that_a_cpu_can_run_passes_on_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch.compile takes most of a minute. Other tests compare its gradients; here layers run uncompiled.
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    path = tmp_path / "report.json"
    small = ["--model-args", json.dumps(GPT), "--repeats", "2", "--microbatches", "3"]
    assert main(["gpu-report", "--device", "cpu", *small, "-o", str(path)]) == 0
    report = json.loads(path.read_text())
    assert [check["name"] for check in report["checks"]] == list(CHECKS)
    found = {check["name"]: check["verdict"] for check in report["checks"]}
    needs_none = [name for name, check in CHECKS.items() if check.needs in (Needs(), Needs(compiler=True))]
    assert found == {name: "pass" if name in needs_none else "not run" for name in CHECKS}
    for check in report["checks"]:
        for line in check["lines"]:
            assert line["verdict"] != "not run" or line["reason"], line
    assert report["lines"]["fail"] == 0
    said = capsys.readouterr().out
    assert "gradients of 2 ranks over gloo against one process" in said
    assert "gradients of compiled layers against one process" in said
    assert "gradients of 2 replicas of 2 ranks over gloo, divided by --shard" in said
    assert "rank 0 names the lost rank" in said
    assert "0 failed" in said.splitlines()[-1]
    page = (tmp_path / "report.html").read_text()
    assert all(escape(check.proves) in page for check in CHECKS.values())
    assert not re.search(r"<script|<link rel=\"stylesheet|src=|@import|url\(", page)


def test_without_a_gpu_the_error_says_what_is_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "report.json"
    assert main(["gpu-report", "-o", str(path)]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert "found no CUDA GPU" in line
    assert "at least one, its driver, and a torch built for CUDA" in line
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--ranks", "1"], "must be at least 2"), (["--only", "eventz"], "must be names of checks")],
)
def test_wrong_input_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gpu-report", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_list_names_every_check_and_why_it_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu-report", "--list", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    for name, check in CHECKS.items():
        assert re.search(rf"^{name}: {re.escape(check.title)}", said, re.MULTILINE)
    assert said.count("(not here: needs") == sum(bool(check.needs.gpus) for check in CHECKS.values())


def own_check(name: str, lines: Any, **more: Any) -> Check:
    return Check(name, f"the check {name}", "nothing", "read <the log>", lines, **more)


def raising(options: ReportOptions) -> Iterator[Line]:
    yield passed("a line before the error")
    raise ZeroDivisionError("of the check")


def test_a_line_that_fails_sets_the_exit_status_and_shows_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = (
        own_check("broken", raising),
        own_check("wrong", lambda options: [failed("a <line>", "2 & 3 differ", "2", "3")]),
        own_check("fine", lambda options: [passed("another", "1", "at most 2")]),
    )
    monkeypatch.setattr(gpu_report, "CHECKS", {check.name: check for check in checks})
    path = tmp_path / "report.json"
    assert main(["gpu-report", "--device", "cpu", "-o", str(path), "--page", str(tmp_path / "p.html")]) == 1
    report = json.loads(path.read_text())
    assert [check["verdict"] for check in report["checks"]] == ["fail", "fail", "pass"]
    assert report["lines"] == {"pass": 2, "fail": 2, "not run": 0}
    assert not report["passed"]
    said = capsys.readouterr().out
    assert "ZeroDivisionError: of the check" in said
    assert said.count("what to do: read <the log>") == 2
    page = (tmp_path / "p.html").read_text()
    assert "a &lt;line&gt;" in page
    assert "2 &amp; 3 differ" in page
    assert page.count("What to do:") == 2
    assert "<line>" not in page


def test_only_the_chosen_checks_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = [own_check("broken", raising), own_check("fine", lambda options: [passed("a line")])]
    monkeypatch.setattr(gpu_report, "CHECKS", {check.name: check for check in checks})
    assert main(["gpu-report", "--device", "cpu", "--only", "fine"]) == 0
    assert "broken" not in capsys.readouterr().out


def test_standard_output_has_only_the_json_if_it_is_the_output(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = [own_check(name, lambda options: [passed("a line")]) for name in ("first", "second")]
    monkeypatch.setattr(gpu_report, "CHECKS", {check.name: check for check in checks})
    assert main(["gpu-report", "--device", "cpu", "-o", "-"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["lines"]["pass"] == 2
    assert "2 passed" in said.err


def test_a_report_that_is_interrupted_leaves_the_checks_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(options: ReportOptions) -> list[Line]:
        raise KeyboardInterrupt

    checks = (own_check("first", lambda options: [passed("a line")]), own_check("second", interrupted))
    monkeypatch.setattr(gpu_report, "CHECKS", {check.name: check for check in checks})
    path = tmp_path / "report.json"
    assert main(["gpu-report", "--device", "cpu", "-o", str(path)]) == 130
    assert [check["name"] for check in json.loads(path.read_text())["checks"]] == ["first"]
    assert "a line" in (tmp_path / "report.html").read_text()


def test_a_check_that_hangs_fails_in_its_time() -> None:
    outcome = run_check(replace(CHECKS["costs-float32"], seconds=0.05), SMALL)
    (line,) = outcome.lines
    assert line.verdict == "fail"
    assert "did not end within 0.05 s" in line.reason


def test_a_check_with_a_crashing_process_fails_with_the_end_of_its_log() -> None:
    options = replace(SMALL, model=ModelSpec("zbv_worker.models.gpt:gpt", {"layers": 0}))
    (line,) = run_check(CHECKS["memory-float32"], options).lines
    assert line.verdict == "fail"
    assert "heads must divide width" in line.reason


@pytest.mark.parametrize(
    ("needs", "device", "gpus", "lack"),
    [
        (Needs(), "cpu", 0, None),
        (Needs(gpus=1), "cpu", 1, "needs a GPU; the report runs with --device cpu"),
        (Needs(gpus=1), "cuda", 1, None),
        (Needs(gpus=2), "cuda", 1, "needs 2 GPUs; found 1"),
        (Needs(a_gpu_per_rank=True), "cuda", 3, "needs 4 GPUs; found 3"),
        (Needs(gpus=1, nccl=True), "cuda", 1, "needs NCCL; this build of torch has none"),
    ],
)
def test_a_check_says_what_it_lacks(
    needs: Needs, device: Any, gpus: int, lack: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert needs.lack(replace(SMALL, device=device, ranks=4)) == lack


@pytest.mark.parametrize(
    ("device", "lack"),
    [
        ("cpu", "needs the C++ compiler absent-compiler, which torch.compile calls"),
        ("cuda", "needs the package triton, which torch.compile calls"),
    ],
)
def test_a_check_of_compiled_layers_says_what_the_compiler_lacks(
    device: Any, lack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", sys.executable if device == "cuda" else "absent-compiler")
    monkeypatch.setattr("zbv_worker.gpu_report.check.find_spec", lambda name: None)
    assert Needs(compiler=True).lack(replace(SMALL, device=device)) == lack


@pytest.mark.parametrize(
    ("gpus", "ranks", "processes"), [(2, 2, 2), (3, 2, 2), (4, 2, 4), (8, 2, 4), (8, 4, 8), (8, 8, 8)]
)
def test_replicas_over_nccl_use_as_many_gpus_as_make_pairs(
    gpus: int, ranks: int, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert replicas.ranks_for_gpus(replace(SMALL, ranks=ranks)) == processes


@pytest.mark.parametrize("kind", ["summed", "sharded"])
@pytest.mark.parametrize("error", [0.1, None])
def test_a_wrong_gradient_of_replicas_fails_its_line(kind: str, error: float | None) -> None:
    right = {"backend": "gloo", "summed": 1e-7, "sharded": 1e-7}
    assert verdicts(replicas.judge_replicas, right, right, right, right) == ["pass", "pass"]
    found = verdicts(replicas.judge_replicas, right, {**right, kind: error}, right, right)
    assert found == (["fail", "pass"] if kind == "summed" else ["pass", "fail"])


@pytest.mark.parametrize(("value", "verdict"), [(1.0, "pass"), (1.01, "fail"), (float("nan"), "fail")])
def test_a_value_passes_up_to_its_limit(value: float, verdict: str) -> None:
    assert at_most("a ratio", value, 1.0).verdict == verdict


EVENTS = {
    "early": False,
    "in_order": True,
    "milliseconds": streams.DELAY,
    "after": 0.0,
    "unrecorded": True,
    "refuses_unfinished": True,
    "refuses_untimed": True,
    "overtaken": streams.STREAMS,
    "priorities": (0, -5),
}
COPIES = {"right_out": True, "right_in": True, "right_kept": True, "host_milliseconds": 0.1}
ONE_RANK = {
    "version": "2.27",
    "right": True,
    "bytes": 1,
    "host_milliseconds": 0.1,
    "early": False,
    "late": True,
    "is_success": "raises",
    "abort_seconds": 1.0,
    "abort_said": "",
    "completed_after_abort": True,
}
RECEIVES = {
    "bytes": 1,
    "cold_seconds": 0.1,
    "last_arrives": True,
    "all_arrive": True,
    "right": True,
    "abort_seconds": 0.1,
    "abort_said": "",
}


def verdicts(judge: Any, *answers: Any) -> list[str]:
    return [line.verdict for line in judge(replace(SMALL, device="cuda"), answers)]


@pytest.mark.parametrize(
    ("judge", "right", "wrong"),
    [
        (streams.judge_events, EVENTS, {"early": True}),
        (streams.judge_events, EVENTS, {"in_order": False}),
        (streams.judge_events, EVENTS, {"after": -1.0}),
        (streams.judge_events, EVENTS, {"milliseconds": 2 * streams.DELAY}),
        (streams.judge_events, EVENTS, {"unrecorded": False}),
        (streams.judge_events, EVENTS, {"refuses_unfinished": False}),
        (streams.judge_events, EVENTS, {"refuses_untimed": False}),
        (streams.judge_events, EVENTS, {"overtaken": streams.STREAMS - 1}),
        (streams.judge_events, EVENTS, {"priorities": (0, 0)}),
        (streams.judge_copies, COPIES, {"right_out": False}),
        (streams.judge_copies, COPIES, {"right_in": False}),
        (streams.judge_copies, COPIES, {"right_kept": False}),
        (streams.judge_copies, COPIES, {"host_milliseconds": streams.DELAY}),
        (communicator.judge_one_rank, ONE_RANK, {"right": False}),
        (communicator.judge_one_rank, ONE_RANK, {"host_milliseconds": streams.DELAY}),
        (communicator.judge_one_rank, ONE_RANK, {"early": True}),
        (communicator.judge_one_rank, ONE_RANK, {"late": False}),
        (communicator.judge_one_rank, ONE_RANK, {"abort_seconds": 11.0}),
        (communicator.judge_one_rank, ONE_RANK, {"abort_said": "abort timed out"}),
    ],
)
def test_a_wrong_value_fails_exactly_one_line(
    judge: Any, right: dict[str, Any], wrong: dict[str, Any]
) -> None:
    assert set(verdicts(judge, right)) == {"pass"}
    assert verdicts(judge, {**right, **wrong}).count("fail") == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"cold_seconds": None},
        {"last_arrives": False},
        {"all_arrive": False},
        {"right": False},
        {"abort_seconds": 11.0},
        {"abort_said": "abort timed out"},
    ],
)
def test_waiting_receives_fail_the_line_of_what_they_stop(wrong: dict[str, Any]) -> None:
    sender = {"bytes": 1, "all_arrive": True, "right": True}
    assert set(verdicts(communicator.judge_receives, sender, RECEIVES)) == {"pass"}
    assert verdicts(communicator.judge_receives, sender, {**RECEIVES, **wrong}).count("fail") == 1


def test_a_refusal_to_share_a_gpu_is_not_a_failure() -> None:
    (line,) = communicator.judge_shared_gpu(SMALL, ["Duplicate GPU detected", "remote error"])
    assert (line.verdict, line.reason) == ("not run", "NCCL refuses: Duplicate GPU detected")


def test_late_marks_fail_the_clock() -> None:
    assert verdicts(streams.judge_clock, [0.0, streams.CLOCK_LIMIT]) == ["pass"]
    assert verdicts(streams.judge_clock, [0.0, streams.CLOCK_LIMIT + 1]) == ["fail"]


class SyncDebug:
    """``torch.cuda``'s switch for warnings about waits of the host, and a call that waits."""

    mode = "default"

    def set_sync_debug_mode(self, mode: str) -> None:
        self.mode = mode

    def item(self) -> None:
        if self.mode == "warn":
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)


def test_calls_that_make_the_host_wait_are_found_within_the_step_only() -> None:
    cuda = SyncDebug()
    cuda.item()
    assert host_waits(lambda: None, cuda) == []
    (found,) = host_waits(cuda.item, cuda)
    assert "called a synchronizing CUDA operation" in found
    assert cuda.mode == "default"


def test_absent_fields_are_found() -> None:
    class Config:
        max_ctas = 0

    class Options:
        config = Config()

    assert lacking_fields(Options(), ["config.max_ctas", "config.min_ctas", "split"]) == [
        "config.min_ctas",
        "split",
    ]


def test_the_page_of_what_is_unproved_names_every_check_and_no_other() -> None:
    text = (ROOT / UNPROVED_PAGE).read_text(encoding="utf-8")
    rows = re.findall(r"^\|.*\| (`[^|]*`)[^|]* \|$|^(`[^`]*`) checks", text, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", "".join(row))}
    assert named == set(CHECKS)


@pytest.mark.parametrize(
    ("facts", "failing"),
    [
        ({}, []),
        ({"lacking": {"torch.cuda": ["Event"]}}, ["torch.cuda has everything"]),
        ({"options": ["config.max_ctas"]}, ["NCCL's options"]),
        (environment_of({"CUDA_LAUNCH_BLOCKING": "1"}), ["no variable of CUDA or NCCL"]),
        (environment_of({"NCCL_MAX_P2P_NCHANNELS": "32"}), []),
    ],
)
def test_what_torch_lacks_and_variables_that_prevent_a_run_fail(
    facts: dict[str, Any], failing: list[str]
) -> None:
    right = {"lacking": {"torch.cuda": []}, "options": [], **environment_of({"HOME": "/"})}
    lines = [line.what for line in judge_facts(SMALL, [{**right, **facts}]) if line.verdict == "fail"]
    assert [line.startswith(start) for line, start in zip(lines, failing, strict=True)] == [True] * len(lines)


def test_doubtful_variables_are_shown() -> None:
    found = environment_of({"NCCL_MAX_P2P_NCHANNELS": "32", "NCCL_DEBUG": "INFO"})
    assert "NCCL_DEBUG=INFO" in found["variables"]
    assert "NCCL_MAX_P2P_NCHANNELS: found 32; recommended 4" in found["doubts"][0]


def answer_of(rank: int = 0, **changed: Any) -> dict[str, Any]:
    """A rank's answer of a pipeline check: 10 ms planned, one step in 10 ms."""
    spread = {"median": 1.0, "p90": 1.0}
    stage = {
        "stage": rank,
        "forward": spread,
        "backward_input": {"median": 0.5, "p90": 1.0},
        "backward_weight": {"median": 0.6, "p90": 1.0},
        "backward": spread,
        "held_after_forward": 0,
        "held_after_input": 0,
    }
    link = {"sender": 0, "receiver": 1, "samples": [], "latency": 1e-5, "bandwidth": 1e9}
    steps = [StepResult(0, {}, (Record(Action(0, "W", 0), 0, 0, end * 1000 * US),)) for end in (10, 20, 30)]
    return {
        "backend": "nccl",
        "variant": "float32",
        "profile": {"rank": rank, "stages": [stage], "static": {}, "p2p": {}, "links": [link]},
        "trace": RankTrace.of("plan", rank, steps).document(),
        "planned_seconds": 0.01,
        "planned_bytes": 1000.0,
        "passed_bytes": 100,
        "held_bytes": 1100,
        "relative_error": 1e-6,
        "host_waits": [],
        "lack": None,
        **changed,
    }


@pytest.mark.parametrize(
    ("judge", "wrong", "line"),
    [
        (pipeline.judge_gradients, {"relative_error": 2e-3}, "gradients of 2 ranks over nccl"),
        (pipeline.judge_gradients, {"relative_error": None}, "gradients of 2 ranks over nccl"),
        (pipeline.judge_gradients, {"held_bytes": 1200}, "rank 1: memory"),
        (pipeline.judge_gradients, {"host_waits": ["item (loss.py:3)"]}, "make the host wait"),
        (pipeline.judge_costs, {"held_bytes": 1200}, "rank 1: memory"),
    ],
)
def test_a_wrong_rank_fails_its_line_of_the_pipeline(judge: Any, wrong: dict[str, Any], line: str) -> None:
    options = replace(SMALL, device="cuda")
    right = answer_of(0)
    assert {each.verdict for each in judge(options, [right, answer_of(1)])} == {"pass"}
    (found,) = (each for each in judge(options, [right, answer_of(1, **wrong)]) if each.verdict == "fail")
    assert line in found.what


def test_a_step_longer_than_planned_fails() -> None:
    lines = pipeline.judge_costs(replace(SMALL, device="cuda"), [answer_of(planned_seconds=0.009)])
    (found,) = (each.what for each in lines if each.verdict == "fail")
    assert found == "measured step divided by the plan's span"


def test_without_a_planner_step_and_memory_are_not_judged() -> None:
    unplanned = answer_of(planned_seconds=None, lack="the planner needs numba")
    lines = [*pipeline.judge_costs(replace(SMALL, device="cuda"), [unplanned])]
    assert [each.reason for each in lines if each.verdict == "not run"] == ["the planner needs numba"] * 2
    assert not any(each.verdict == "fail" for each in lines)


def test_gradients_that_are_not_numbers_are_wrong() -> None:
    right = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}
    assert relative_error(right, right) == 0
    assert relative_error({**right, "b": torch.tensor([1.0, float("nan")])}, right) == float("inf")


def test_an_expensive_split_fails_on_a_gpu_and_is_only_shown_on_a_cpu() -> None:
    expensive = answer_of()
    expensive["profile"]["stages"][0]["backward_weight"] = {"median": 0.8, "p90": 1.0}
    found = {
        device: next(iter(pipeline.judge_costs(replace(SMALL, device=device), [expensive]))).verdict
        for device in ("cuda", "cpu")
    }
    assert found == {"cuda": "fail", "cpu": "pass"}


@pytest.mark.parametrize(("error", "verdict"), [(1e-6, "pass"), (2e-3, "fail"), (None, "fail")])
def test_compiled_layers_must_have_the_gradients_of_others(error: float | None, verdict: str) -> None:
    answer = answer_of(variant="compiled", relative_error=error)
    first = next(iter(pipeline.judge_costs(replace(SMALL, device="cuda"), [answer])))
    assert first.what.startswith("gradients of compiled layers against one process")
    assert first.verdict == verdict


def test_the_page_and_the_json_need_two_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    assert main(["gpu-report", "--device", "cpu", "--only", "facts", "-o", str(path)]) == 2
    assert "this is also the file of the page" in capsys.readouterr().err
    assert path.read_text() == "old"
