"""The ``zbv`` command as users meet it: statuses, streams, messages."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.problems import uniform_document
from support.rank_traces import trace_documents
from zbv_solver.commands.cli import main
from zbv_solver.construct.baselines import BASELINES
from zbv_solver.plans.plan import Plan
from zbv_solver.search.claims import load_plan
from zbv_solver.search.run import search

Capture = pytest.CaptureFixture[str]


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


def test_plan_writes_a_plan_and_reports_its_quality(problem: Path, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "plan.json"
    assert main(["plan", str(problem), "-o", str(path)]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "span 24 (proved optimal)" in err
    assert json.loads(path.read_text())["metrics"]["span"] == 24
    assert main(["check", str(problem), str(path)]) == 0
    assert capsys.readouterr().out.startswith("valid\n")
    assert main(["export", str(path), "--format", "torch-csv"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_compare_shows_every_baseline(problem: Path, capsys: Capture) -> None:
    assert main(["compare", str(problem), "--json"]) == 0
    names = [row["name"] for row in json.loads(capsys.readouterr().out)["baselines"]]
    assert names == list(BASELINES)
    assert main(["compare", str(problem)]) == 0
    table = capsys.readouterr().out
    assert "lower bound of span: 24" in table
    assert "eager-1f1b" in table


def test_compare_cuts_no_number_in_a_narrow_terminal(tmp_path: Path, capsys: Capture) -> None:
    """Names of the baselines of microbatches that differ are long."""
    differing = uniform_document(2, 4) | {"sequences": [[1000], [2000], [500, 500], [3000]]}
    differing["costs"]["forward"] = {"fixed": 0.25, "tokens": 1}
    assert main(["compare", str(write(tmp_path / "differing.json", differing)), "--effort", "quick"]) == 0
    table = capsys.readouterr().out
    assert "interleaved-1f1b-practice" in table
    assert "dynapipe" in table
    assert "…" not in table


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON|nested too deeply"),
        ("3", "must be a JSON object"),
        ("{}", "wrong.json: /pp_degree: this key is required"),
        (json.dumps(uniform_document(2, 4) | {"costs": {"forward": -1}}), "/costs/backward_input"),
        (json.dumps(uniform_document(2, 4)).replace('"forward": 1,', '"forward": NaN,', 1), "finite number"),
        ("\xff", "is not UTF-8"),
    ],
    ids=range(7),
)
def test_wrong_input_is_status_2_without_a_traceback(
    content: str, says: str, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "wrong.json"
    path.write_bytes(content.encode("latin-1"))
    assert main(["plan", str(path), "-o", str(tmp_path / "plan.json")]) == 2
    assert re.match(f"zbv: .*({says})", capsys.readouterr().err)
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize(
    ("command", "status", "says"),
    [
        ("plan no/such/file.json", 2, "zbv: no/such/file.json: No such file"),
        ("plan problem.json --time-limit -1", 2, "zbv: --time-limit: found -1.0; must be"),
        ("plan problem.json --jitter=much", 2, "--jitter: found 'much'; jitter is written as 5%"),
        ("plan problem.json --jitter=ranks.json", 2, "--jitter: /rank: found 3 values; must be one, or one"),
        ("plan problem.json --quantile=0.9", 2, "--quantile: is of the times when durations vary"),
        ("plan problem.json --jitter=5% --quantile=1", 2, "--quantile: found 1; must be from 0.5 to 0.99"),
        ("plan plan.json", 2, "plan.json: this is a plan, not a problem"),
        ("plan tight.json", 3, "smallest feasible limit per rank is [2, 2]"),
        ("compare problem.json --workers 0", 2, "zbv: --workers: found 0; must be"),
        ("check problem.json problem.json", 2, "problem.json: this is a problem, not a plan"),
        ("check other.json plan.json", 2, "they differ in memory"),
        ("check problem.json false.json", 2, "the stated span 23 is too small"),
        ("export plan.json --format docx", 2, "--format: found 'docx'; must be one of torch-csv"),
        ("simulate plan.json --jitter=much", 2, "--jitter: found 'much'; jitter is written as 5%"),
        ("simulate plan.json --jitter=-5%", 2, "--jitter"),
        ("simulate plan.json --jitter=absent.json", 2, "absent.json: No such file"),
        ("simulate plan.json --scenarios=0", 2, "--scenarios: found 0; must be"),
        ("simulate plan.json --seed=-1", 2, "--seed: found -1; must be"),
    ],
)
def test_mistakes_are_named(
    command: str, status: int, says: str, plan: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(plan.parent)
    false = json.loads(plan.read_text())
    false["metrics"]["span"] -= 1
    write(Path("false.json"), false)
    write(Path("ranks.json"), {"rank": [0.1, 0.1, 0.1]})
    for name, limit in (("other", 5), ("tight", 1.5)):
        write(Path(f"{name}.json"), uniform_document(2, 4, limit=limit))
    assert main(command.split()) == status
    out, err = capsys.readouterr()
    assert (out, says in err) == ("", True), err


def test_an_output_that_cannot_be_written_is_refused_before_the_search(
    problem: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "zbv_solver.commands.searches.search", lambda *_, **__: pytest.fail("the search began")
    )
    assert main(["plan", str(problem), "-o", "/no/such/folder/plan.json"]) == 2
    assert "/no/such/folder/plan.json: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_writes_the_best_plan_so_far(
    number: signal.Signals, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = uniform_document(4, 16, limit=6)
    problem, path = write(tmp_path / "problem.json", document), tmp_path / "plan.json"
    searched = search

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


def test_on_a_terminal_a_plan_is_summarised(
    problem: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert main(["plan", str(problem), "--effort", "quick"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("span 24 (proved optimal), bubble rate")
    assert "eager-1f1b" in out
    assert "  rank 1: 1F0 2F0 " in out
    assert "not saved" in out


def test_help_describes_the_efforts_and_their_durations(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    shown = capsys.readouterr().out
    assert "thorough" in shown.partition("about how long they take")[2]
    assert "another seed may find another plan" in " ".join(shown.split())


def test_standard_input_and_output_in_a_real_process(problem: Path) -> None:
    command = [sys.executable, "-m", "zbv_solver.commands.cli"]
    made = subprocess.run(
        [*command, "plan", "-", "--effort", "quick"],
        input=problem.read_text(), capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    checked = subprocess.run(
        [*command, "check", str(problem), "-"],
        input=made.stdout, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert checked.stdout.startswith("valid\n")
    assert made.stderr == ""


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, zbv_solver.commands.cli as cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('numba', 'numpy', 'rich', 'ortools', 'jinja2') if m in sys.modules])"
    )
    made = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert made.stdout.splitlines()[-1] == "[]"


def test_simulate_compares_schedules_in_the_same_scenarios(plan: Path, capsys: Capture) -> None:
    assert main(["simulate", str(plan), "--jitter", "action=5%,transfer=20%", "--scenarios", "32"]) == 0
    shown = capsys.readouterr().out
    assert "span in 32 scenarios" in shown
    assert all(name in shown for name in ("zbv", "1f1b", "interleaved-1f1b", "p95"))
    assert main(["simulate", str(plan), "--scenarios", "32", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["jitter"] == {"action": 0.05, "rank": 0, "transfer": 0.2}
    assert found["expected_span"] > 24
    assert found["plan_id"] == json.loads(plan.read_text())["plan_id"]


def test_simulate_reads_a_jitter_document_and_traces(plan: Path, tmp_path: Path, capsys: Capture) -> None:
    document = {"action": {"samples": [0.9, 1.1]}, "rank": 0.01, "transfer": 0}
    path = write(tmp_path / "jitter.json", document)
    assert main(["simulate", str(plan), "--jitter", str(path), "--scenarios", "32", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["jitter"] == document
    known = load_plan(plan)
    paths = [
        str(write(tmp_path / f"trace-{rank}.json", trace))
        for rank, trace in enumerate(
            trace_documents(known.problem, known.orders, plan_id=known.plan_id, steps=2)
        )
    ]
    command = ["simulate", str(plan), "--scenarios", "32", "--json", "--jitter"]
    assert main([*command, ",".join(paths)]) == 0
    assert set(json.loads(capsys.readouterr().out)["jitter"]["rank"]["samples"]) == {1}
    other = json.loads(Path(paths[0]).read_text())
    assert main([*command, str(write(tmp_path / "other.json", {**other, "plan_id": "a" * 64}))]) == 2
    assert "the plan given is" in capsys.readouterr().err


def test_plan_chooses_for_jitter(problem: Path, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "jitter-plan.json"
    flags = ["--jitter", "action=5%,transfer=20%", "--quantile", "0.95", "--effort", "quick"]
    assert main(["plan", str(problem), "-o", str(path), *flags]) == 0
    document = json.loads(path.read_text())
    assert document["simulation"]["jitter"] == {"action": 0.05, "rank": 0, "transfer": 0.2}
    assert document["provenance"]["quantile"] == 0.95
    assert main(["check", str(problem), str(path)]) == 0
