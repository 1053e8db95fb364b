"""``zbv plan``, ``compare``, ``pack``, ``simulate``: statuses, streams, files; mistakes in all commands."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import zbv_solver as zbv
from support.batches import batch_document
from support.cuts import BLOCK, RECOMPUTE, layered
from support.executor_layers import layer
from support.problems import uniform_document
from support.rank_traces import trace_documents
from zbv_solver.commands.cli import main
from zbv_solver.commands.interrupt import interruptible
from zbv_solver.commands.messages import shortened, spinner
from zbv_solver.commands.tables import cut_summary, print_frontier
from zbv_solver.construct.baselines import BASELINES

Run = Callable[[str], tuple[str, str]]
DIFFERING = uniform_document(2, 4) | {"sequences": [[1000], [2000], [500, 500], [3000]]}
DIFFERING["costs"]["forward"] = {"fixed": 0.25, "tokens": 1}
BLOCKS = [layer("embedding", 1, held=2), layer("block", 2, held=2, repeat=6), layer("head", 3, held=2)]
MODEL: dict[str, Any] = {"pp_degree": 2, "microbatches": 4, "layers": BLOCKS}
SHAPE = {"hidden": 512, "layers": 4, "heads": 8, "vocabulary": 1024, "sequence": 512}
CLUSTER = {"nodes": 1, "gpus_per_node": 2, "device": "h100"}
DOCUMENTS: dict[str, Any] = {
    "problem": uniform_document(2, 4, limit=4),
    "other": uniform_document(2, 4, limit=5),
    "tight": uniform_document(2, 4, limit=1.5),
    "large": uniform_document(4, 16, limit=6),
    "differing": DIFFERING,
    "model": MODEL,
    "small": {**MODEL, "memory": {"limit": 3}},
    "narrow": {**MODEL, "memory": {"limit": 15}},
    "backwards": {**MODEL, "layers": [layer("head", 1), layer("block", 1)]},
    "gpt": {"model": SHAPE, "global_batch": 8},
    "transformers": {"model_type": "llama"},
    "t5": {"model_type": "t5"},
    "cluster": CLUSTER,
    "cluster-list": [],
    "cluster-H100": {**CLUSTER, "device": "H100"},
    "unbatched": {"model": SHAPE},
    "cluster-tiny": {**CLUSTER, "memory": 1e6},
    "batch": batch_document([8] * 8, max_tokens=8),
    "one": batch_document([8], max_tokens=8, replicas=1),
    "full": batch_document([64, 64], limit=100),
    "jitter": {"action": {"samples": [0.9, 1.1]}, "rank": 0.01, "transfer": 0},
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run ``zbv`` in a folder with all documents; returns what it wrote to both streams."""
    monkeypatch.chdir(tmp_path)
    for name, document in DOCUMENTS.items():
        Path(f"{name}.json").write_text(json.dumps(document))

    def command(text: str) -> tuple[str, str]:
        assert main(text.split()) == 0
        printed = capsys.readouterr()
        return printed.out, printed.err

    return command


def written(name: str) -> Any:
    return json.loads(Path(name).read_text())


@pytest.mark.parametrize(
    "flags", ["", "--jitter action=5%,transfer=20% --quantile 0.95 --effort quick"], ids=["exact", "jitter"]
)
def test_plan_writes_a_plan_and_reports_its_quality(flags: str, run: Run) -> None:
    out, err = run(f"plan problem.json -o plan.json {flags}")
    assert (out, "plan.json: span 24 units (proved optimal)" in err) == ("", True)
    document = written("plan.json")
    assert document["metrics"]["span"] == 24
    assert run("check problem.json plan.json")[0].startswith("valid\n")
    if flags:
        assert document["simulation"]["jitter"] == {"action": 0.05, "rank": 0, "transfer": 0.2}
        assert document["provenance"]["quantile"] == 0.95


INTERRUPTED = """\
plan large.json -o plan.json → zbv_solver.commands.searches.search
pack batch.json -o packed.json → zbv_solver.commands.searches.search
frontier large.json -o . → zbv_solver.commands.searches.search
cut model.json --executor megatron -o plan.json → zbv_solver.commands.cut.cut_for_executor
layout gpt.json --cluster cluster.json -o layouts.json → zbv_models.layouts.search.first_plan
"""
KEPT = {"frontier": "points", "packed": "replicas", "layouts": "layouts"}
"""The key with what is kept, by the name of the file."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("row", INTERRUPTED.splitlines())
def test_ctrl_c_keeps_the_best_so_far(row: str, number: int, run: Run, capsys: Any, monkeypatch: Any) -> None:
    command, name = row.split(" → ")
    module, function = name.rsplit(".", 1)
    whole = getattr(import_module(module), function)

    def interrupted(*arguments: Any, **named: Any) -> Any:
        cancelled = named.get("cancelled") or arguments[1]
        if not cancelled():
            os.kill(os.getpid(), number)
        while not cancelled():
            time.sleep(0.01)
        return whole(*arguments, **named)

    monkeypatch.setattr(name, interrupted)
    assert main(command.split()) == 130
    assert "interrupted: the search ended early, and the" in capsys.readouterr().err
    if "plan.json" in command:
        run("check plan.json")
    else:
        name = next(name for name in KEPT if name in command)
        assert len(written(f"{name}.json")[KEPT[name]]) == (2 if name == "packed" else 1)


@pytest.mark.parametrize("delay", [0, 0.3])
def test_ctrl_c_stops_the_work_before_it_is_passed_on(delay: float) -> None:
    stopped = Event()

    def work(cancelled: Callable[[], bool]) -> None:
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGINT)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not stopped.wait(0.01):
            if cancelled():
                stopped.set()

    with pytest.raises(KeyboardInterrupt):
        interruptible(work)
    assert stopped.is_set()
    assert interruptible(lambda cancelled: cancelled()) is False
    with pytest.raises(ZeroDivisionError):
        interruptible(lambda _: 1 // 0)


def test_on_a_terminal_the_answer_is_summarised(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    for command, words in (
        ("plan problem.json", "span 24 units (proved optimal), |eager-1f1b|rank 1: 1F0 2F0 |not saved"),
        ("pack batch.json --compare", "equal-tokens|lower bound of every packing|not saved"),
    ):
        out, _ = run(f"{command} --effort quick")
        assert [word for word in words.split("|") if word not in out] == []


def test_standard_input_and_output_in_a_real_process_and_help_imports_nothing_heavy(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def python(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(command, input=text, capture_output=True, text=True, timeout=120, check=True)

    command = ("-m", "zbv_solver.commands.cli", "plan", "-", "--effort", "quick")
    made = python(*command, text=json.dumps(uniform_document(2, 4)))
    progress = [line for line in made.stderr.splitlines() if re.match(r"\d+ s: ", line)]
    assert made.stderr.splitlines() == progress  # of a busy machine
    monkeypatch.setattr("sys.stdin", io.StringIO(made.stdout))
    assert run("check -")[0].startswith("valid\n")
    code = (
        "import sys, zbv_solver.commands.cli as cli\n"
        "try: cli.main(['plan', '--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('numba', 'numpy', 'rich', 'ortools', 'jinja2') if m in sys.modules])"
    )
    shown = python("-c", code).stdout
    assert "thorough" in shown.partition("about how long they take")[2]
    assert shown.splitlines()[-1] == "[]"


def test_compare_shows_every_schedule(run: Run) -> None:
    baselines = json.loads(run("compare problem.json --json")[0])["baselines"]
    assert [row["name"] for row in baselines] == list(BASELINES)
    assert "lower bound of span: 24 units" in run("compare problem.json")[0]


def test_tables_cut_nothing_in_a_narrow_terminal(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Names of the schedules of microbatches that differ are long."""
    run("plan differing.json --effort quick -o plan.json")
    plan = zbv.load_plan("plan.json")
    print_frontier(plan.problem, [zbv.FrontierPoint(1234567.0, plan, plan.objective * 0.81234, 1.0, 1.2345)])
    tables = capsys.readouterr().out + run("compare differing.json --effort quick")[0]
    assert (tables.count(" interleaved-1f1b-practice "), "…" in tables) == (2, False)
    line = "19 layouts, best step 3.608 s, none below 4.166 s"
    assert [shortened(line, width) for width in (99, 40, 8)] == [line, line[:29], "19"]


def test_long_work_prints_lines_without_a_terminal(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("zbv_solver.commands.messages.LINE_SECONDS", 0.01)
    shown, until = "", time.monotonic() + 60
    with spinner("searching", 60) as say:
        say("span 3 ms")
        while "0 s of 60 s: span 3 ms\n" not in shown and time.monotonic() < until:
            time.sleep(0.01)
            shown += capsys.readouterr().err
    assert "0 s of 60 s: span 3 ms\n" in shown


def test_simulate_compares_schedules_in_the_same_scenarios_of_every_kind_of_jitter(run: Run) -> None:
    run("plan problem.json -o plan.json --effort quick")
    plan = zbv.load_plan("plan.json")
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
    assert (default["expected_span"] > 24, default["plan_id"]) == (True, plan.plan_id)
    assert given["jitter"] == written("jitter.json")
    assert set(measured["jitter"]["rank"]["samples"]) == {1}


def test_a_packing_is_written_and_its_quality_reported(run: Run) -> None:
    for name, counted in ("batch", "8 microbatches on 2 replicas"), ("one", "1 microbatch on 1 replica,"):
        out, err = run(f"pack {name}.json -o packed.json")
        assert (out, counted in err) == ("", True)
        packed = written("packed.json")
        assert len(packed["replicas"]) == written(f"{name}.json")["replicas"]
        assert packed["baselines"][0]["step_time"] is None
        Path("plan.json").write_text(json.dumps(packed["replicas"][0]["plan"]))
        run("check plan.json")


AT_FIVE = "rank 0: embedding … block.4; 27 units a |rank 1: block.5 … head; 30 units a |below 120 units ("
LEAN = {"layers": [{**BLOCK, "recompute": RECOMPUTE, "repeat": 2}]}


@pytest.mark.parametrize(("changes", "words", "is_uneven"), [
    ({"placement": "single", "cut": {"first": 5}}, AT_FIVE, True),
    ({**LEAN, "memory": {"limit": 8}, "cut": {"allow_empty": True}}, " (recomputed)|nothing", False),
    ({"layers": [{**BLOCK, "repeat": 5}]}, "least 20\u202f% more than the mean", True),
    ({"layers": [{**BLOCK, "repeat": 8}]}, "", False),
    ({"layers": [layer("a", 0, repeat=4)]}, "", False),
])  # fmt: skip
def test_the_summary_of_a_cut_has_the_layers_of_every_rank(changes: Any, words: str, is_uneven: bool) -> None:
    summary = cut_summary(zbv.plan(layered(**changes), "quick", seed=1))
    assert all(word in summary for word in words.split("|"))
    assert ("cannot be divided evenly" in summary.splitlines()[-1]) == is_uneven


SHORT = {
    "CUT": "cut model.json --executor megatron --effort quick",
    "ESTIMATE": "estimate --preset gpt-1.5b",
    "LAYOUT": "layout gpt.json --cluster cluster.json",
    "FIXED": "layout gpt.json --cluster cluster.json --executor megatron --recompute none",
}

MISTAKES = """\
plan brace.json → brace.json: the file is not JSON
plan twice.json → twice.json: found the key "microbatches" twice in one object
plan deep.json → deep.json: the
plan empty.json → empty.json: /pp_degree: this key is required
plan plan.json → plan.json: this is a plan, not a problem
plan batch.json → this is a batch, not a problem. `zbv pack` packs it.
pack problem.json → this is a problem, not a batch.
export packed.json --format svg → this is a packing, not a plan. The plan of replica 0 is under
check problem.json problem.json → problem.json: this is a problem, not a plan
check other.json plan.json → they differ in memory
check problem.json false.json → the stated span 23 is too small
check problem.json plan.json --problem problem.json → found two problems
check schedule.csv → a schedule has no costs. Give its problem: --problem FILE
plan problem.json -o /no/such/plan.json → /no/such/plan.json: No such file or directory
plan no/such/file.json → zbv: no/such/file.json: No such file
plan problem.json --time-limit -1 → zbv: --time-limit: found -1.0; must be
plan problem.json --jitter=much → --jitter: found 'much'; jitter is written as 5%
plan problem.json --jitter=trace.json → this is a trace, which needs the plan that it belongs to
plan problem.json --quantile=0.9 → --quantile: is of the times when durations vary
plan problem.json --jitter=5% --quantile=1 → --quantile: found 1; must be from 0.5 to 0.99
export plan.json --format torch-cvs → torchtitan, chrome-trace, svg, html. Did you mean torch-csv?
simulate plan.json --jitter=much → or traces is also accepted
simulate plan.json --jitter=trace.json → trace.json: /plan_id: found aaaaaaaaaaaa; the plan given is
simulate plan.json --scenarios=0 → --scenarios: found 0; must be
refit plan.json plan.json → plan.json: this is a plan, not a trace.
refit plan.json trace.json → trace.json: /plan_id: found aaaaaaaaaaaa; the plan given is
CUT --virtual-stages 2 -3 → --virtual-stages: found -3 virtual stages
CUT --group-size 5 --executor torch → --group-size: found it and executor torch
CUT --schedule 1F1B → --schedule: found it and executor megatron
CUT --executor torch --schedule ZBVZeroBubble --virtual-stages 3 → --virtual-stages, --schedule: found 4
CUT --layout 3,3 --virtual-stages 1 2 → --virtual-stages: found 2 numbers
CUT --layout 3,3 --virtual-stages 2 → --layout: found 2 stages on 2 ranks, and --virtual-stages 2; leave it
CUT --layout 3,3 --recompute per-stage → --recompute: found per-stage
cut problem.json --executor torch → problem.json: /layers: this key is absent or already cut
cut backwards.json --executor megatron → backwards.json: /layers: found layers with
LAYOUT --top 0 → --top: found 0; must be at least 1
LAYOUT --zero-stage 4 → --zero-stage: found 4; must be at most 3
LAYOUT --time-limit 1e-9 --executor megatron → --time-limit: found 1e-09 seconds
LAYOUT --sensitivity --executor torch → --sensitivity: found it and --executor torch
LAYOUT --tensor-parallel 3 --zero-stage 0 → zbv: --tensor-parallel, --zero-stage: no layout
LAYOUT --executor megatron --recompute selective --recompute-modules moe → --recompute-modules: found moe
LAYOUT --executor torchtitan --precision float8-gather → Set product_dtype fp8
LAYOUT --cut 4 → --cut: found a cut and executor zbv. Name an executor with a fixed order
FIXED --cut 4 → a cut is that of one. Fix --tensor-parallel
layout --cluster cluster.json → model, --preset: found neither
LAYOUT --frozen 0-99 → --frozen: found 0-99; the model has layers
LAYOUT --lora-rank 4 --target-modules experts → --target-modules: found experts; no frozen layer has
LAYOUT --prediction-layers -1 → --prediction-layers: found -1; input should be
layout transformers.json --cluster cluster.json → --global-batch: a config.json does not say it
layout problem.json --cluster cluster.json → problem.json: this is a problem, not a model's configuration.
layout gpt.json --cluster gpt.json → gpt.json: this is a model's configuration, not a cluster.
plan cluster.json → this is a cluster, not a problem. `zbv layout --cluster` takes it.
layout gpt.json --cluster cluster-list.json → cluster-list.json: found []; must be a JSON object
plan t5.json → t5.json: this is a model's configuration, not a problem. `zbv estimate --config` makes
layout unbatched.json --cluster cluster.json → /global_batch: this key is required and absent. Give it, or
layout gpt.json --cluster cluster-H100.json → Did you mean h100?
estimate --config gpt.json → --preset: found no device. Name one of a100
estimate → --config, --preset: found neither; give one
estimate --preset h100 → --preset: found no model. Name one of deepseek-v3
estimate --config transformers.json → --sequence-length: a config.json does not say how long
ESTIMATE --heads 5 → --heads: found 5; must divide hidden (2304)
ESTIMATE --memory-limit nan → --memory-limit: found nan
estimate --preset deepseek-v3 --recompute selective → or give other recompute_modules
"""
INFEASIBLE = """\
plan tight.json → smallest feasible limit per rank is [2, 2]
pack full.json → smallest feasible limit
cut small.json --executor megatron → the closest cut would need
cut narrow.json --executor megatron --no-free-order --time-limit 1e-9 → The time limit ended the search
cut small.json --executor megatron --layout 3,3 --time-limit 1e-9 -o given.json → rank 0: 3 < 
layout gpt.json --cluster cluster-tiny.json → no layout fits
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All documents, a plan of the problem, one that states too short a span, and a trace of another plan."""
    path = tmp_path_factory.mktemp("mistakes")
    for name, document in DOCUMENTS.items():
        (path / f"{name}.json").write_text(json.dumps(document))
    twice = json.dumps(DOCUMENTS["problem"]).replace("{", '{"microbatches": 9, ', 1).encode()
    for name, text in {"brace": b"{", "twice": twice, "deep": b"[" * 100_000, "empty": b"{}"}.items():
        (path / f"{name}.json").write_bytes(text)
    (path / "schedule.csv").write_text("0F0,0B0")
    assert main(["plan", f"{path}/problem.json", "-o", f"{path}/plan.json", "--effort", "quick"]) == 0
    plan = json.loads((path / "plan.json").read_text())
    packed = {"replicas": [{"plan": plan}], "step_time": 1}
    plan["metrics"]["span"] -= 1
    known = zbv.load_plan(path / "plan.json")
    trace, _ = trace_documents(known.problem, known.orders)  # of another plan
    for name, document in (("false", plan), ("packed", packed), ("trace", trace)):
        (path / f"{name}.json").write_text(json.dumps(document))
    return path


@pytest.mark.parametrize(
    ("status", "row"),
    [(2, row) for row in MISTAKES.splitlines()] + [(3, row) for row in INFEASIBLE.splitlines()],
)
def test_a_mistake_is_named_and_nothing_is_written(
    status: int, row: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command, message = row.split(" → ")
    name, *arguments = command.split()
    monkeypatch.chdir(folder)
    if status == 2:
        monkeypatch.setattr("zbv_solver.commands.searches.search", lambda *_, **__: pytest.fail("too late"))
    before = {*folder.iterdir()}
    assert main([*SHORT.get(name, name).split(), *arguments]) == status
    out, err = capsys.readouterr()
    assert out == "" or "-o given.json" in command
    assert err.startswith("zbv: ")
    assert message in " ".join(err.split())
    assert {*folder.iterdir()} == before


def test_the_command_alone_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "search a plan for a problem" in capsys.readouterr().out
