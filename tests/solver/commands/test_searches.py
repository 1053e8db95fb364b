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
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.claims import load_plan
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search

Capture = pytest.CaptureFixture[str]
PROGRAM = [sys.executable, "-m", "zbv_solver.commands.cli"]
DIFFERING = uniform_document(2, 4) | {"sequences": [[1000], [2000], [500, 500], [3000]]}
DIFFERING["costs"]["forward"] = {"fixed": 0.25, "tokens": 1}
JITTER = {"action": 0.05, "rank": 0, "transfer": 0.2}


@pytest.fixture(scope="module")
def problem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("cli") / "problem.json", uniform_document(2, 4, limit=4))


@pytest.fixture(scope="module")
def plan(problem: Path) -> Path:
    path = problem.with_name("plan.json")
    assert main(["plan", str(problem), "-o", str(path), "--effort", "quick"]) == 0
    return path


def write(path: Path, document: object) -> Path:
    path.write_text(json.dumps(document))
    return path


# --- zbv plan


def test_plan_writes_a_plan_and_reports_its_quality(problem: Path, tmp_path: Path, capsys: Capture) -> None:
    path = str(tmp_path / "plan.json")
    for flags in ((), ("--jitter", "action=5%,transfer=20%", "--quantile", "0.95", "--effort", "quick")):
        assert main(["plan", str(problem), "-o", path, *flags]) == 0
        out, err = capsys.readouterr()
        assert (out, f"{path}: span 24 (proved optimal)" in err) == ("", True)
        document = json.loads(Path(path).read_text())
        assert document["metrics"]["span"] == 24
        assert main(["check", str(problem), path]) == 0
        assert capsys.readouterr().out.startswith("valid\n")
    assert document["simulation"]["jitter"] == JITTER
    assert document["provenance"]["quantile"] == 0.95


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_writes_the_best_plan_so_far(
    number: signal.Signals, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = write(tmp_path / "problem.json", uniform_document(4, 16, limit=6))
    path, searched = tmp_path / "plan.json", search

    def interrupted(problem: Any, options: Any, on_progress: Any, cancelled: Callable[[], bool]) -> Plan:
        os.kill(os.getpid(), number)
        while not cancelled():
            time.sleep(0.01)
        return searched(problem, options, on_progress, cancelled)

    monkeypatch.setattr("zbv_solver.commands.searches.search", interrupted)
    assert main(["plan", str(problem), "-o", str(path)]) == 130
    err = capsys.readouterr().err
    assert f"{path}: span" in err
    assert "zbv: interrupted: the search ended early, and the plan written is the best" in err
    assert main(["check", str(problem), str(path)]) == 0
    assert json.loads(path.read_text())["provenance"]["cut"] == "cancelled"


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
    command: str, words: list[str], problem: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.chdir(problem.parent)
    write(Path("batch.json"), batch_document([8] * 8, max_tokens=8))
    assert main([*command.split(), "--effort", "quick"]) == 0
    out = capsys.readouterr().out
    assert all(each in out for each in words)


def test_standard_input_and_output_in_a_real_process(problem: Path) -> None:
    def run(text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*PROGRAM, *arguments], input=text, capture_output=True, text=True, timeout=120, check=True
        )

    made = run(problem.read_text(), "plan", "-", "--effort", "quick")
    assert made.stderr == ""
    assert run(made.stdout, "check", str(problem), "-").stdout.startswith("valid\n")


def test_help_describes_efforts_and_imports_nothing_heavy() -> None:
    code = (
        "import sys, zbv_solver.commands.cli as cli\n"
        "try: cli.main(['plan', '--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('numba', 'numpy', 'rich', 'ortools', 'jinja2') if m in sys.modules])"
    )
    made = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert "thorough" in made.stdout.partition("about how long they take")[2]
    assert made.stdout.splitlines()[-1] == "[]"


# --- zbv compare and zbv simulate


def test_compare_shows_every_schedule(problem: Path, capsys: Capture) -> None:
    assert main(["compare", str(problem), "--json"]) == 0
    names = [row["name"] for row in json.loads(capsys.readouterr().out)["baselines"]]
    assert names == list(BASELINES)
    assert main(["compare", str(problem)]) == 0
    table = capsys.readouterr().out
    assert "lower bound of span: 24" in table
    assert "eager-1f1b" in table


def test_tables_cut_no_number_and_no_name_in_a_narrow_terminal(tmp_path: Path, capsys: Capture) -> None:
    """Names of the schedules of microbatches that differ are long."""
    assert main(["compare", str(write(tmp_path / "differing.json", DIFFERING)), "--effort", "quick"]) == 0
    plan = search(parse_problem(DIFFERING), SearchOptions("quick"))
    point = FrontierPoint(1234567.0, plan, plan.objective * 0.812345, 1.0, 1.234567)
    print_frontier(plan.problem, [point])
    table = capsys.readouterr().out
    assert table.count(" interleaved-1f1b-practice ") == 2
    assert "…" not in table


def test_simulate_compares_schedules_in_the_same_scenarios(plan: Path, capsys: Capture) -> None:
    assert main(["simulate", str(plan), "--jitter", "action=5%,transfer=20%", "--scenarios", "32"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("span in 32 scenarios", "zbv", "1f1b", "interleaved-1f1b", "p95"))
    assert main(["simulate", str(plan), "--scenarios", "32", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["jitter"] == JITTER
    assert found["expected_span"] > 24
    assert found["plan_id"] == json.loads(plan.read_text())["plan_id"]


def test_simulate_reads_a_jitter_document_and_traces(plan: Path, tmp_path: Path, capsys: Capture) -> None:
    document = {"action": {"samples": [0.9, 1.1]}, "rank": 0.01, "transfer": 0}
    known = load_plan(plan)
    traces = trace_documents(known.problem, known.orders, plan_id=known.plan_id, steps=2)
    paths = [write(tmp_path / f"trace-{rank}.json", trace) for rank, trace in enumerate(traces)]
    answers = []
    for given in (str(write(tmp_path / "jitter.json", document)), ",".join(map(str, paths))):
        assert main(["simulate", str(plan), "--scenarios", "32", "--json", "--jitter", given]) == 0
        answers.append(json.loads(capsys.readouterr().out)["jitter"])
    assert answers[0] == document
    assert set(answers[1]["rank"]["samples"]) == {1}


# --- zbv pack


@pytest.mark.parametrize(
    ("lengths", "replicas", "counted"),
    [([8] * 8, 2, "8 microbatches on 2 replicas"), ([8], 1, "1 microbatch on 1 replica,")],
)
def test_a_packing_is_written_and_its_quality_reported(
    lengths: list[int], replicas: int, counted: str, tmp_path: Path, capsys: Capture
) -> None:
    batch = write(tmp_path / "batch.json", batch_document(lengths, max_tokens=8, replicas=replicas))
    path = tmp_path / "packed.json"
    assert main(["pack", str(batch), "-o", str(path)]) == 0
    out, err = capsys.readouterr()
    assert (out, counted in err) == ("", True)
    packed = json.loads(path.read_text())
    assert len(packed["replicas"]) == replicas
    assert packed["baselines"][0]["step_time"] is None
    plan = write(tmp_path / "plan.json", packed["replicas"][0]["plan"])
    assert main(["check", str(plan)]) == 0


# --- the summary of a cut


def summary(**changes: Any) -> list[str]:
    return cut_summary(search(layered(**changes), SearchOptions("quick", seed=1))).splitlines()


def test_a_line_names_the_layers_of_a_rank_and_their_cost() -> None:
    lines = summary(placement="single", cut={"first": 5})
    assert lines[0] == "  rank 0: embedding … block.4; 27 a microbatch"
    assert lines[1] == "  rank 1: block.5 … head; 30 a microbatch"
    assert lines[2].startswith("  placement single; no cut of these layers has a span below 120 (gap ")
    assert len(lines) == 3 + 1  # and finer layers may help


NOTHING = {"name": "a", "forward": 0, "backward_input": 0, "backward_weight": 0, "repeat": 4}
LEAN = {**BLOCK, "recompute": RECOMPUTE, "repeat": 2}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": [LEAN], "memory": {"limit": 8}, "cut": {"allow_empty": True}}, "(recomputed) nothing"),
        ({"layers": [{**BLOCK, "repeat": 5}]}, "least 20% more than the mean"),
        ({"layers": [{**BLOCK, "repeat": 8}]}, ""),
        ({"layers": [NOTHING]}, ""),
    ],
)
def test_recomputed_empty_and_uneven_stages_are_named(changes: dict[str, Any], words: str) -> None:
    lines = summary(**changes)
    assert all(word in " ".join(lines) for word in words.split())
    assert ("cannot be divided evenly" in lines[-1]) == ("mean" in words)
