"""`zbv-service submit`: follows the search, writes the plan, and keeps the best plan found on Ctrl-C."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.live import Live, live_service
from support.processes import wait_until
from support.serving import DEADLINE, PROBLEM
from zbv_service.client import Client, Search
from zbv_service.commands.cli import main
from zbv_solver.plans.reading import parse_plan

COMMAND = [sys.executable, "-c", "import sys; from zbv_service.commands.cli import main; sys.exit(main())"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("submit")


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Live]:
    with live_service(folder, "held", searches=2, heartbeat_seconds=0.2) as found:
        yield found


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


Ran = tuple[int, str, str]
Submit = Callable[..., Ran]


@pytest.fixture
def submit(live: Live, capsys: pytest.CaptureFixture[str]) -> Submit:
    """Runs the command in this process; returns its status, standard output and standard error."""

    def run(*arguments: object) -> Ran:
        status = main(["submit", "--server", live.address, *map(str, arguments)])
        written = capsys.readouterr()
        return status, written.out, written.err

    return run


@pytest.mark.usefixtures("released")
def test_the_plan_goes_to_standard_output_and_progress_to_standard_error(
    submit: Submit, problem: Path
) -> None:
    status, out, err = submit(problem, "--seed", 1)
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
    submit: Submit, live: Live, problem: Path, tmp_path: Path
) -> None:
    output = tmp_path / "plan.json"
    options = ("--effort", "quick", "--seed", 5, "--time-limit", 7)
    assert submit(problem, *options, "-q", "-o", output) == (0, "", "")
    parse_plan(json.loads(output.read_text()))
    with Client(live.address) as client:
        given = {"effort": "quick", "seed": 5, "time_limit": 7}
        assert client.searches(1)[0].options == given | {"jitter": None, "quantile": None}


def test_detach_prints_the_id_and_leaves_the_search_running(
    submit: Submit, live: Live, problem: Path
) -> None:
    status, out, err = submit(problem, "--seed", 2, "--detach")
    assert (status, err) == (0, "")
    with Client(live.address) as client:
        assert not client.search(out.strip()).is_finished
        client.cancel(out.strip())
        client.wait(out.strip(), timeout=DEADLINE)


@pytest.mark.parametrize(
    ("problem_text", "options", "status", "said"),
    [
        (json.dumps({**PROBLEM, "pp_degree": "two"}), (), 2, "-: /pp_degree: "),
        (json.dumps({**PROBLEM, "ranks": []}), (), 2, "standard input: this is a plan, not a problem"),
        ("{", (), 2, "not JSON"),
        ("NaN", (), 2, "NaN"),
        (json.dumps(PROBLEM), ("--time-limit", "-1"), 2, "zbv-service: --time-limit: "),
        (json.dumps({**PROBLEM, "memory": {**PROBLEM["memory"], "limit": 1}}), (), 3, "infeasible"),
    ],
)
def test_the_exit_status_and_the_message_name_the_mistake(
    submit: Submit, monkeypatch: pytest.MonkeyPatch, problem_text: str, options: Any, status: int, said: str
) -> None:
    monkeypatch.setattr(sys, "stdin", StringIO(problem_text))
    found, out, err = submit("-", *options)
    assert (found, out, said in err) == (status, "", True)


def test_a_missing_file_and_a_missing_service_are_named(
    submit: Submit, problem: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = submit(problem.with_name("nothing.json"))
    assert (status, "nothing.json" in err) == (2, True)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert main(["submit", "--server", address, str(problem)]) == 1
    err = capsys.readouterr().err
    assert ("zbv-service serve" in err, "Traceback" in err) == (True, False)


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


def test_ctrl_c_ends_the_search_and_keeps_the_best_plan(live: Live, problem: Path) -> None:
    process, search = interrupted(live, problem, "--seed", "3")
    with process:
        out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130, err
    assert "Ctrl-C again" in err
    assert parse_plan(json.loads(out)).metrics.gap == 1.0
    with Client(live.address) as client:
        assert client.search(search.id).state == "cancelled"


def test_a_second_ctrl_c_leaves_at_once(tmp_path: Path, problem: Path) -> None:
    with live_service(tmp_path, "deaf", shutdown_seconds=0.5) as live:
        process, left = interrupted(live, problem, "--seed", "4")
        with process:
            address = f"{live.address}/v1/searches/{left.id}"
            wait_until(lambda: httpx.get(address).json()["cancel_requested"], "the cancellation")
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
    live: Live, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model, cluster, answer = (tmp_path / f"{name}.json" for name in ("model", "cluster", "answer"))
    cluster.write_text(json.dumps(CLUSTER))
    flags = ["--cluster", str(cluster), "--server", live.address]
    preset = ["layout", "--preset", "llama-3.1-8b", *flags]
    known = [*preset, "--global-batch", "2"]

    def asked(*arguments: str) -> dict[str, Any]:
        """The request of the command's search, as the service has read it."""
        assert main([*known, *arguments, "-o", str(answer)]) == 0
        with Client(live.address) as client:
            (search,) = client.searches(1, kind="layouts")
        found: dict[str, Any] = httpx.get(f"{live.address}/v1/searches/{search.id}/problem").json()
        return found

    assert asked("--data-parallel", "1")["fixed"]["data_parallel"] == 1
    best, _ = json.loads(answer.read_text())["layouts"]
    shown = capfd.readouterr().err
    assert (best["plan_id"] in shown, " units" in shown) == (True, False)
    modules = ["--executor", "megatron", "--recompute", "selective", "--recompute-modules", "core_attn"]
    found = asked("--pipeline-parallel", "2", "--time-limit", "60", *modules)
    assert (found["executor"], found["recompute_modules"]) == ("megatron", ["core_attn"])
    assert (found["fixed"]["recompute"], found["options"]["time_limit"]) == ("selective", 60.0)
    found = asked("--points", "--sensitivity")
    assert (found["points"], found["sensitivity"]) == (True, True)
    assert main([*known, "--detach"]) == 0
    with Client(live.address) as client:
        assert client.wait(capfd.readouterr().out.strip(), timeout=DEADLINE).state == "done"

    model.write_text(json.dumps({"presets": ["llama-3.1-8b"], "global_batch": 2, "model": {"layers": 0}}))
    no_layer = "--recompute-modules: found moe; no layer of this model has them"
    for arguments, message in (
        (["layout", *flags], "model, --preset: found neither"),
        ([*known, str(model)], "model, --preset: found both"),
        (preset, "--global-batch: this key is"),
        ([*known, "--tensor-parallel", "3"], "--tensor-parallel: no layout divides"),
        (["layout", str(model), *flags], f"{model}: /model/layers: found 0"),
        ([*known, "--profile", str(model)], f"{model}: this is a model's"),
        ([*known, "--time-limit", "nan"], "--time-limit: found nan"),
        ([*known, "--executor", "megatron", "--points"], "--points: found true and executor 'megatron'"),
        ([*known, "--recompute", "selective", "--recompute-modules", "moe"], no_layer),
    ):
        status, err = main(arguments), capfd.readouterr().err
        assert (status, message in err) == (2, True), (message, err)
    cluster.write_text(json.dumps({**CLUSTER, "memory": 1e9}))
    assert (main(known), "no layout fits" in capfd.readouterr().err) == (3, True)
