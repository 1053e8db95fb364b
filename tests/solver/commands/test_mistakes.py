"""What commands answer to mistakes: an exit status, and a message that names the place and the rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.batches import batch_document
from support.executor_layers import layer
from support.problems import uniform_document
from support.rank_traces import trace_documents
from zbv_solver.commands.cli import main
from zbv_solver.search.claims import load_plan

Capture = pytest.CaptureFixture[str]
STAGES = uniform_document(2, 4, limit=4)
BLOCKS = [layer("embedding", 1, held=2), layer("block", 2, held=2, repeat=6), layer("head", 3, held=2)]
MODEL: dict[str, Any] = {"pp_degree": 2, "microbatches": 4, "layers": BLOCKS}
GPT = {
    "model": {"hidden": 512, "layers": 4, "heads": 8, "vocabulary": 1024, "sequence": 512},
    "global_batch": 8,
}
CLUSTER = {"nodes": 1, "gpus_per_node": 2, "device": "h100"}
DOCUMENTS = {
    "problem": STAGES,
    "other": uniform_document(2, 4, limit=5),
    "tight": uniform_document(2, 4, limit=1.5),
    "jitter": {"rank": [0.1, 0.1, 0.1]},
    "model": MODEL,
    "small": {**MODEL, "memory": {"limit": 3}},
    "narrow": {**MODEL, "memory": {"limit": 15}},
    "backwards": {**MODEL, "layers": [layer("head", 1), layer("block", 1)]},
    "gpt": GPT,
    "transformers": {"model_type": "llama"},
    "cluster": CLUSTER,
    "cluster-list": [],
    "cluster-tiny": {**CLUSTER, "memory": 1e6},
    "batch": batch_document([8, 8]),
    "full": batch_document([64, 64], limit=100),
}
TEXTS = {"brace": b"{", "deep": b"[" * 100_000, "empty": b"{}"}
SHORT = {
    "CUT": "cut model.json --executor megatron --effort quick",
    "ESTIMATE": "estimate --preset gpt-1.5b",
    "LAYOUT": "layout gpt.json --cluster cluster.json",
}

MISTAKES = """\
plan brace.json → brace.json: the file is not JSON
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
plan no/such/file.json → zbv: no/such/file.json: No such file
plan problem.json --time-limit -1 → zbv: --time-limit: found -1.0; must be
plan problem.json --jitter=much → --jitter: found 'much'; jitter is written as 5%
plan problem.json --jitter=trace.json → this is a trace, which needs the plan that it belongs to
plan problem.json --quantile=0.9 → --quantile: is of the times when durations vary
plan problem.json --jitter=5% --quantile=1 → --quantile: found 1; must be from 0.5 to 0.99
export plan.json --format docx → --format: found 'docx'; must be one of torch-csv
simulate plan.json --jitter=much → or traces is also accepted
simulate plan.json --jitter=trace.json → trace.json: /plan_id: found aaaaaaaaaaaa; the plan given is
simulate plan.json --scenarios=0 → --scenarios: found 0; must be
refit plan.json trace.json → trace.json: /plan_id: found aaaaaaaaaaaa; the plan given is
CUT --virtual-stages 2 -3 → --virtual-stages: found -3 virtual stages
CUT --group-size 5 --executor torch → --group-size: found it and executor torch
CUT --schedule 1F1B → --schedule: found it and executor megatron
CUT --executor torch --schedule ZBVZeroBubble --virtual-stages 3 → --virtual-stages, --schedule: found 4
CUT --layout Et*4|tL → --layout: found the modules Et*5L; the model has Et*6L
CUT --layout 3,3 --virtual-stages 1 2 → --virtual-stages: found 2 numbers
CUT --layout 3,3 --recompute per-stage → --recompute: found per-stage
cut problem.json --executor torch → problem.json: /layers: this key is absent or already cut
cut backwards.json --executor megatron → backwards.json: /layers: found layers with
LAYOUT --top 0 → --top: found 0; must be at least 1
LAYOUT --zero-stage 4 → --zero-stage: found 4; must be at most 3
LAYOUT --time-limit 1e-9 --executor megatron → --time-limit: found 1e-09 seconds
LAYOUT --sensitivity --executor torch → --sensitivity: found it and --executor torch
LAYOUT --tensor-parallel 3 --zero-stage 0 → zbv: --tensor-parallel, --zero-stage: no layout
LAYOUT --executor megatron --recompute selective --recompute-modules moe → --recompute-modules: found moe
layout --cluster cluster.json → model, --preset: found neither
LAYOUT --prediction-layers -1 → --prediction-layers: found -1; input should be
layout transformers.json --cluster cluster.json → --global-batch: a config.json does not say it
layout gpt.json --cluster cluster-list.json → cluster-list.json: found []; must be a JSON object
estimate → --config, --preset: found neither; give one
estimate --preset gpt-5 → --preset: found 'gpt-5'; not a preset. Use one of a100, a100-80gb
estimate --config transformers.json → --sequence: a config.json does not say how long
ESTIMATE --heads 5 → --heads: found 5; must divide hidden (2304)
ESTIMATE --memory-limit nan → --memory-limit: found nan
estimate --preset deepseek-v3 --recompute selective → or give other recompute_modules
"""
INFEASIBLE = """\
plan tight.json → smallest feasible limit per rank is [2, 2]
pack full.json → smallest feasible limit
cut small.json --executor megatron → the closest cut would need
cut narrow.json --executor megatron --no-free-order --time-limit 1e-9 → The time limit ended the search
cut small.json --executor megatron --layout 3,3 -o given.json → rank 0: 3 < 
layout gpt.json --cluster cluster-tiny.json → no layout fits
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All documents, a plan of the problem, one that states too short a span, and a trace of another plan."""
    path = tmp_path_factory.mktemp("mistakes")
    for name, document in DOCUMENTS.items():
        (path / f"{name}.json").write_text(json.dumps(document))
    for name, text in TEXTS.items():
        (path / f"{name}.json").write_bytes(text)
    (path / "schedule.csv").write_text("0F0,0B0")
    assert main(["plan", f"{path}/problem.json", "-o", f"{path}/plan.json", "--effort", "quick"]) == 0
    plan = json.loads((path / "plan.json").read_text())
    packed = {"replicas": [{"plan": plan}], "step_time": 1}
    plan["metrics"]["span"] -= 1
    known = load_plan(path / "plan.json")
    trace, _ = trace_documents(known.problem, known.orders)  # of another plan
    for name, document in (("false", plan), ("packed", packed), ("trace", trace)):
        (path / f"{name}.json").write_text(json.dumps(document))
    return path


@pytest.mark.parametrize(
    ("status", "row"),
    [(2, row) for row in MISTAKES.splitlines()] + [(3, row) for row in INFEASIBLE.splitlines()],
)
def test_a_mistake_is_named_and_nothing_is_written(
    status: int, row: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    command, message = row.split(" → ")
    name, *arguments = command.split()
    monkeypatch.chdir(folder)
    before = {*folder.iterdir()}
    assert main([*SHORT.get(name, name).split(), *arguments]) == status
    out, err = capsys.readouterr()
    assert out == "" or "-o given.json" in command
    assert err.startswith("zbv: ")
    assert message in " ".join(err.split())
    assert {*folder.iterdir()} == before


def test_an_output_that_cannot_be_written_is_refused_before_the_search(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "zbv_solver.commands.searches.search", lambda *_, **__: pytest.fail("the search began")
    )
    assert main(["plan", str(folder / "problem.json"), "-o", "/no/such/folder/plan.json"]) == 2
    assert "/no/such/folder/plan.json: No such file or directory" in capsys.readouterr().err
