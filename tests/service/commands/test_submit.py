"""`zbv-service submit`: follows the search, writes the plan, and keeps the best plan found on Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.live import Command, Live, live_service
from support.processes import wait_until
from support.serving import DEADLINE, PROBLEM
from zbv_service.client import Client, Search
from zbv_solver.plans.reading import parse_plan

COMMAND = [sys.executable, "-c", "import sys; from zbv_service.commands.cli import main; sys.exit(main())"]


@pytest.fixture
def problem(tmp_path: Path) -> Path:
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(PROBLEM))
    return path


@pytest.fixture
def released(folder: Path) -> Iterator[None]:
    """Searches end as soon as they start."""
    (folder / "release").touch()
    yield
    (folder / "release").unlink()


@pytest.mark.usefixtures("released")
def test_the_plan_goes_to_standard_output_progress_to_standard_error(command: Command, problem: Path) -> None:
    status, out, err = command("submit", problem, "--seed", 1)
    assert status == 0
    plan = parse_plan(json.loads(out))
    *progress, last = err.splitlines()
    assert any("running" in line for line in progress)
    assert plan.plan_id in last
    assert all(
        word in last
        for word in ("objective 8 units", "bound 4 units", "gap 100.00\u202f%", "released", "http://")
    )


@pytest.mark.usefixtures("released")
def test_quiet_writes_the_plan_to_a_file_and_options_reach_the_search(
    command: Command, client: Client, problem: Path, tmp_path: Path
) -> None:
    output = tmp_path / "plan.json"
    options = ("--effort", "quick", "--seed", 5, "--time-limit", 7)
    assert command("submit", problem, *options, "-q", "-o", output) == (0, "", "")
    parse_plan(json.loads(output.read_text()))
    given = {"effort": "quick", "seed": 5, "time_limit": 7}
    assert client.searches(1)[0].options == given | {"jitter": None, "quantile": None}


@pytest.mark.usefixtures("released")
def test_layers_may_be_in_a_table_in_the_same_folder(command: Command, tmp_path: Path) -> None:
    (tmp_path / "layers.csv").write_text("name,repeat,F,I,W\nblock,2,1,1,1\n")
    problem = {"pp_degree": 2, "microbatches": 2, "placement": "single", "layers": "layers.csv"}
    (tmp_path / "problem.json").write_text(json.dumps(problem))
    status, out, err = command("submit", tmp_path / "problem.json", "--detach")
    assert (status, len(out.split()), err) == (0, 1, "")


def test_detach_prints_the_id_while_the_search_runs(command: Command, client: Client, problem: Path) -> None:
    status, out, err = command("submit", problem, "--seed", 2, "--detach")
    assert (status, err) == (0, "")
    assert not client.search(out.strip()).is_finished
    # A search that has not begun would be cancelled without a plan.
    wait_until(lambda: client.search(out.strip()).objective is not None, "a plan")
    client.cancel(out.strip())
    client.wait(out.strip(), timeout=DEADLINE)


@pytest.mark.parametrize(
    ("problem_text", "options", "status", "said"),
    [
        (json.dumps({**PROBLEM, "pp_degree": "two"}), (), 2, "-: /pp_degree: "),
        (json.dumps({**PROBLEM, "ranks": []}), (), 2, "standard input: this is a plan, not a problem"),
        ("{", (), 2, "not JSON"),
        ("NaN", (), 2, "NaN"),
        (json.dumps({**PROBLEM, "layers": "no.csv"}), (), 2, "zbv-service: cannot read no.csv: No such file"),
        (json.dumps(PROBLEM), ("--time-limit", "-1"), 2, "zbv-service: --time-limit: "),
        (json.dumps({**PROBLEM, "memory": {**PROBLEM["memory"], "limit": 1}}), (), 3, "infeasible"),
    ],
)
def test_the_exit_status_and_the_message_name_the_mistake(
    command: Command, monkeypatch: pytest.MonkeyPatch, problem_text: str, options: Any, status: int, said: str
) -> None:
    monkeypatch.setattr(sys, "stdin", StringIO(problem_text))
    found, out, err = command("submit", "-", *options)
    assert (found, out, said in err) == (status, "", True)


def interrupted(live: Live, problem: Path, *options: str) -> tuple[subprocess.Popen[str], Search]:
    """The command in another process, after Ctrl-C while it follows a search that has found a plan."""
    command = [*COMMAND, "submit", "--server", live.address, str(problem), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "objective" in line:
            break
    with Client(live.address) as client:
        search = client.searches(1)[0]
    process.send_signal(signal.SIGINT)
    return process, search


def test_ctrl_c_ends_the_search_and_keeps_the_best_plan(live: Live, client: Client, problem: Path) -> None:
    process, search = interrupted(live, problem, "--seed", "3")
    with process:
        out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130, err
    assert "Ctrl-C again" in err
    assert parse_plan(json.loads(out)).metrics.gap == 1.0
    assert client.search(search.id).state == "cancelled"


def test_a_second_ctrl_c_leaves_at_once(tmp_path: Path, problem: Path) -> None:
    with live_service(tmp_path, "deaf", shutdown_seconds=0.5) as live:
        process, left = interrupted(live, problem, "--seed", "4")
        with process:
            address = f"{live.address}/v1/searches/{left.id}"
            wait_until(lambda: httpx.get(address, timeout=60).json()["cancel_requested"], "the cancellation")
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=DEADLINE)
        assert (process.returncode, out) == (130, "")
        assert left.id in err
        assert "Traceback" not in err
        (tmp_path / "release").touch()
        with Client(live.address) as client:
            client.wait(left.id, timeout=DEADLINE)


CLUSTER = {"nodes": 1, "gpus_per_node": 2, "device": "h200"}


def test_layout_writes_the_answer_and_names_what_is_wrong(
    command: Command, live: Live, client: Client, tmp_path: Path
) -> None:
    model, cluster, answer = (tmp_path / f"{name}.json" for name in ("model", "cluster", "answer"))
    cluster.write_text(json.dumps(CLUSTER))
    layout = ["layout", "--cluster", cluster]
    preset = [*layout, "--preset", "llama-3.1-8b"]
    known = [*preset, "--global-batch", 2]
    flags = ("--executor", "megatron", "--recompute", "selective", "--recompute-modules", "core_attn")
    status, _, err = command(*known, *flags, "--pipeline-parallel", 2, "--time-limit", 60, "-o", answer)
    best, *_ = json.loads(answer.read_text())["layouts"]
    assert (status, best["plan_id"] in err, " units" in err) == (0, True, False)
    (search,) = client.searches(1, kind="layouts")
    asked = httpx.get(f"{live.address}/v1/searches/{search.id}/problem", timeout=60).json()
    assert (asked["executor"], asked["recompute_modules"]) == ("megatron", ["core_attn"])
    assert (asked["fixed"]["recompute"], asked["options"]["time_limit"]) == ("selective", 60.0)
    assert (asked["fixed"]["pipeline_parallel"], asked["points"]) == (2, False)

    model.write_text(json.dumps({"presets": ["llama-3.1-8b"], "global_batch": 2, "model": {"layers": 0}}))
    no_layer = "--recompute-modules: found moe; no layer of this model has them"
    for arguments, message in (
        (layout, "model, --preset: found neither"),
        ([*known, model], "model, --preset: found both"),
        (preset, "--global-batch: this key is"),
        ([*known, "--tensor-parallel", 3], "--tensor-parallel: no layout divides"),
        ([*layout, model], f"{model}: /model/layers: found 0"),
        ([*known, "--profile", model], f"{model}: this is a model's"),
        ([*known, "--time-limit", "nan"], "--time-limit: found nan"),
        ([*known, "--points", "--executor", "megatron"], "--points: found true and executor 'megatron'"),
        ([*known, "--recompute", "selective", "--recompute-modules", "moe"], no_layer),
    ):
        status, _, err = command(*arguments)
        assert (status, message in err) == (2, True), (message, err)
    unknown = {"model_type": "persimmon", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 512,
               "num_hidden_layers": 4, "num_attention_heads": 4}  # fmt: skip
    model.write_text(json.dumps(unknown))
    measured = [*layout, model, "--global-batch", 2]
    assert "--sequence-length: a config.json does not say" in command(*measured)[2]
    measured += ["--sequence-length", 64, "--pipeline-parallel", 2]
    assert command(*measured, "-o", answer)[0] == 0
    (search,) = client.searches(1, kind="layouts")
    asked = httpx.get(f"{live.address}/v1/searches/{search.id}/problem", timeout=60).json()
    assert "PersimmonForCausalLM" in asked["model"]["model"]["origin"]["measured"]
    cluster.write_text(json.dumps({**CLUSTER, "memory": 1e9}))
    status, _, err = command(*known)
    assert (status, "no layout fits" in err) == (3, True)
