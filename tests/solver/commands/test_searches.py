"""``zbv plan``, ``compare``, ``pack`` and ``simulate`` as users meet them: statuses, streams and files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.batches import batch_document
from support.cuts import BLOCK, RECOMPUTE, layered
from support.problems import uniform_document
from support.rank_traces import trace_documents
from zbv_solver.commands.cli import main
from zbv_solver.commands.tables import cut_summary, print_frontier
from zbv_solver.construct.baselines import BASELINES
from zbv_solver.frontiers.frontier import FrontierPoint
from zbv_solver.plans.plan import Plan
from zbv_solver.search.claims import load_plan
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search

Run = Callable[[str], tuple[str, str]]
DIFFERING = uniform_document(2, 4) | {"sequences": [[1000], [2000], [500, 500], [3000]]}
DIFFERING["costs"]["forward"] = {"fixed": 0.25, "tokens": 1}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run ``zbv`` in a folder with documents; returns what it wrote to both streams."""
    monkeypatch.chdir(tmp_path)
    for name, document in {
        "problem": uniform_document(2, 4, limit=4),
        "differing": DIFFERING,
        "batch": batch_document([8] * 8, max_tokens=8),
        "one": batch_document([8], max_tokens=8, replicas=1),
        "jitter": {"action": {"samples": [0.9, 1.1]}, "rank": 0.01, "transfer": 0},
    }.items():
        Path(f"{name}.json").write_text(json.dumps(document))

    def command(text: str) -> tuple[str, str]:
        assert main(text.split()) == 0
        printed = capsys.readouterr()
        return printed.out, printed.err

    return command


def written(name: str) -> Any:
    return json.loads(Path(name).read_text())


# --- zbv plan


@pytest.mark.parametrize(
    "flags", ["", "--jitter action=5%,transfer=20% --quantile 0.95 --effort quick"], ids=["exact", "jitter"]
)
def test_plan_writes_a_plan_and_reports_its_quality(flags: str, run: Run) -> None:
    out, err = run(f"plan problem.json -o plan.json {flags}")
    assert (out, "plan.json: span 24 (proved optimal)" in err) == ("", True)
    document = written("plan.json")
    assert document["metrics"]["span"] == 24
    assert run("check problem.json plan.json")[0].startswith("valid\n")
    if flags:
        assert document["simulation"]["jitter"] == {"action": 0.05, "rank": 0, "transfer": 0.2}
        assert document["provenance"]["quantile"] == 0.95


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_writes_the_best_plan_so_far(
    number: signal.Signals, run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("large.json").write_text(json.dumps(uniform_document(4, 16, limit=6)))
    searched = search

    def interrupted(problem: Any, options: Any, on_progress: Any, cancelled: Callable[[], bool]) -> Plan:
        os.kill(os.getpid(), number)
        while not cancelled():
            time.sleep(0.01)
        return searched(problem, options, on_progress, cancelled)

    monkeypatch.setattr("zbv_solver.commands.searches.search", interrupted)
    assert main(["plan", "large.json", "-o", "plan.json"]) == 130
    err = capsys.readouterr().err
    assert "plan.json: span" in err
    assert "zbv: interrupted: the search ended early, and the plan written is the best" in err
    run("check large.json plan.json")
    assert written("plan.json")["provenance"]["cut"] == "cancelled"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            "plan problem.json",
            ["span 24 (proved optimal), bubble rate", "eager-1f1b", "  rank 1: 1F0 2F0 ", "not saved"],
        ),
        ("pack batch.json --compare", ["equal-tokens", "lower bound of every packing", "not saved"]),
    ],
)
def test_on_a_terminal_the_answer_is_summarised(
    command: str, words: list[str], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    out, _ = run(f"{command} --effort quick")
    assert all(each in out for each in words)


def test_standard_input_and_output_in_a_real_process_and_help_imports_nothing_heavy() -> None:
    def python(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(command, input=text, capture_output=True, text=True, timeout=120, check=True)

    zbv = ("-m", "zbv_solver.commands.cli")
    made = python(*zbv, "plan", "-", "--effort", "quick", text=json.dumps(uniform_document(2, 4)))
    assert made.stderr == ""
    assert python(*zbv, "check", "-", text=made.stdout).stdout.startswith("valid\n")
    code = (
        "import sys, zbv_solver.commands.cli as cli\n"
        "try: cli.main(['plan', '--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('numba', 'numpy', 'rich', 'ortools', 'jinja2') if m in sys.modules])"
    )
    shown = python("-c", code).stdout
    assert "thorough" in shown.partition("about how long they take")[2]
    assert shown.splitlines()[-1] == "[]"


# --- zbv compare, zbv simulate and zbv pack


def test_compare_shows_every_schedule(run: Run) -> None:
    baselines = json.loads(run("compare problem.json --json")[0])["baselines"]
    assert [row["name"] for row in baselines] == list(BASELINES)
    table, _ = run("compare problem.json")
    assert all(words in table for words in ("lower bound of span: 24", "eager-1f1b"))


def test_tables_cut_no_number_and_no_name_in_a_narrow_terminal(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names of the schedules of microbatches that differ are long."""
    run("plan differing.json --effort quick -o plan.json")
    plan = load_plan("plan.json")
    print_frontier(plan.problem, [FrontierPoint(1234567.0, plan, plan.objective * 0.812345, 1.0, 1.234567)])
    tables = capsys.readouterr().out + run("compare differing.json --effort quick")[0]
    assert (tables.count(" interleaved-1f1b-practice "), "…" in tables) == (2, False)


def test_simulate_compares_schedules_in_the_same_scenarios_of_every_kind_of_jitter(run: Run) -> None:
    run("plan problem.json -o plan.json --effort quick")
    plan = load_plan("plan.json")
    traces = trace_documents(plan.problem, plan.orders, plan_id=plan.plan_id, steps=2)
    for rank, trace in enumerate(traces):
        Path(f"trace-{rank}.json").write_text(json.dumps(trace))
    shown, _ = run("simulate plan.json --jitter action=5%,transfer=20% --scenarios 32")
    assert all(name in shown for name in ("span in 32 scenarios", "zbv", "1f1b", "interleaved-1f1b", "p95"))
    default, given, measured = (
        json.loads(run(f"simulate plan.json --scenarios 32 --json {jitter}")[0])
        for jitter in ("", "--jitter jitter.json", "--jitter trace-0.json,trace-1.json")
    )
    assert default["jitter"] == {"action": 0.05, "rank": 0, "transfer": 0.2}
    assert default["expected_span"] > 24
    assert default["plan_id"] == plan.plan_id
    assert given["jitter"] == written("jitter.json")
    assert set(measured["jitter"]["rank"]["samples"]) == {1}


@pytest.mark.parametrize(
    ("name", "counted"),
    [("batch", "8 microbatches on 2 replicas"), ("one", "1 microbatch on 1 replica,")],
)
def test_a_packing_is_written_and_its_quality_reported(name: str, counted: str, run: Run) -> None:
    out, err = run(f"pack {name}.json -o packed.json")
    assert (out, counted in err) == ("", True)
    packed = written("packed.json")
    assert len(packed["replicas"]) == written(f"{name}.json")["replicas"]
    assert packed["baselines"][0]["step_time"] is None
    Path("plan.json").write_text(json.dumps(packed["replicas"][0]["plan"]))
    run("check plan.json")


# --- the summary of a cut

NOTHING = {"name": "a", "forward": 0, "backward_input": 0, "backward_weight": 0, "repeat": 4}
LEAN = {**BLOCK, "recompute": RECOMPUTE, "repeat": 2}


@pytest.mark.parametrize(
    ("changes", "words", "is_uneven"),
    [
        (
            {"placement": "single", "cut": {"first": 5}},
            "  rank 0: embedding … block.4; 27 a microbatch\n  rank 1: block.5 … head; 30 a microbatch\n"
            "  placement single; no cut of these layers has a span below 120 (gap ",
            True,
        ),
        ({"layers": [LEAN], "memory": {"limit": 8}, "cut": {"allow_empty": True}}, " (recomputed)", False),
        ({"layers": [LEAN], "memory": {"limit": 8}, "cut": {"allow_empty": True}}, "nothing", False),
        ({"layers": [{**BLOCK, "repeat": 5}]}, "least 20% more than the mean", True),
        ({"layers": [{**BLOCK, "repeat": 8}]}, "", False),
        ({"layers": [NOTHING]}, "", False),
    ],
)
def test_the_summary_of_a_cut_has_the_layers_of_every_rank_and_says_what_is_uneven(
    changes: dict[str, Any], words: str, is_uneven: bool
) -> None:
    summary = cut_summary(search(layered(**changes), SearchOptions("quick", seed=1)))
    assert words in summary
    assert ("cannot be divided evenly" in summary.splitlines()[-1]) == is_uneven
