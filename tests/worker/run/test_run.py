"""``zbv-worker run`` on real processes: it trains, and errors name the cause."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from unittest.mock import MagicMock, Mock

import pytest
import torch
from support.plans import random_plan, unit_problem, write_plan
from support.processes import wait_until
from support.rank_files import found_by
from zbv_solver.construct.baselines import baseline
from zbv_solver.plans.orders import Orders
from zbv_worker.commands.cli import main
from zbv_worker.errors import InvalidRun
from zbv_worker.execution.plan_source import PlanSource
from zbv_worker.host.local_ranks import LaunchError, LocalRanks, python_command, rank_environment
from zbv_worker.host.process import usable_cores
from zbv_worker.model.spec import ModelSpec
from zbv_worker.run import run
from zbv_worker.run.options import RunOptions
from zbv_worker.tracing.report import RankReport, read_reports, summarise
from zbv_worker.transport.connect import connect
from zbv_worker.transport.world import Layout, World

TIMEOUT = 2.0
LATE = {"barrier": 2, "ranks": 1, "replicas": 2}
"""The rank that is late, by collective."""


def error_of(what: str, late: int, folder: Path) -> str:
    """What a rank's collective raises; the late one waits until the others have raised it."""
    world = World.from_environment()
    replicas = world.world_size if what == "replicas" else 1
    transport = connect(world, "gloo", torch.device("cpu"), 60.0, Layout.of_world(world.world_size, replicas))
    transport.barrier(60.0)  # from here on, only the late rank is late
    files = {rank: folder / f"{what}-{rank}" for rank in range(world.world_size)}
    said = ""
    if world.rank == late:
        _wait_for(path for rank, path in files.items() if rank != late)
    else:
        try:
            if what == "barrier":
                transport.barrier(TIMEOUT)
            elif what == "ranks":
                transport.sum_over_ranks(torch.ones(1), TIMEOUT)
            else:
                transport.sum_over_replicas(torch.ones(1)).wait(TIMEOUT)
        except TimeoutError as error:
            said = str(error)
        if world.rank == 0:  # it serves the store, in which the others look for the missing rank
            _wait_for(path for rank, path in files.items() if rank not in (0, late))
        files[world.rank].touch()
    transport.close()
    return said


def _wait_for(paths: Iterable[Path]) -> None:
    for path in paths:
        while not path.exists():
            time.sleep(0.02)


def of_rank(folder: Path) -> dict[str, str]:
    """What every collective raises on this rank."""
    return {what: error_of(what, late, folder) for what, late in LATE.items()}


MODEL = {"layers": 4, "width": 16, "heads": 2, "length": 16, "sequences": 2, "characters": 20_000}
PLAN = random_plan(2, 4, seed=3)


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    return write_plan(tmp_path / "random.json", *PLAN)


def run_arguments(plan: Path, *more: str, timeout: float = 120) -> list[str]:
    model = ["--model", "zbv_worker.models.gpt:gpt", "--model-args", json.dumps(MODEL)]
    return ["run", "--plan-file", str(plan), *model, "--steps", "3", "--timeout", str(timeout), *more]


def ranks(arguments: Sequence[Sequence[str]], folder: Path) -> LocalRanks:
    return LocalRanks([python_command("zbv_worker.commands.cli", *a) for a in arguments], folder)


def until_said(started: LocalRanks, text: str) -> None:
    """Wait until rank 0's log contains a text."""
    wait_until(lambda: text in started.log(0), text)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder of a run of two ranks that choose their threads, and the ranks' logs."""
    folder = tmp_path_factory.mktemp("alone")
    plan = write_plan(folder / "plan.json", *PLAN)
    files = ["--result-dir", str(folder / "results"), "--trace", str(folder / "out" / "trace.json")]
    command = python_command("zbv_worker.commands.cli", *run_arguments(plan, *files))
    # Local ranks have OMP_NUM_THREADS, which would decide.
    with LocalRanks([["env", "-u", "OMP_NUM_THREADS", *command]] * 2, folder / "logs") as started:
        started.wait(timeout=240)
        return folder, [started.log(rank) for rank in range(2)]


def test_ranks_share_the_hosts_cores_and_say_so(alone: tuple[Path, list[str]]) -> None:
    threads = max(1, len(usable_cores()) // 2)
    for rank, log in enumerate(alone[1]):
        said = rf"rank {rank}: {threads} compute threads? \(\d+ cores, 2 ranks on this host\)"
        assert re.search(said, log), log


def test_a_run_writes_one_trace_of_all_ranks(alone: tuple[Path, list[str]]) -> None:
    document = json.loads((alone[0] / "out" / "trace.json").read_text())
    events = [event for event in document["traceEvents"] if event["ph"] == "X"]
    for rank in range(2):
        names = [event["name"] for event in events if event["tid"] == rank and event["cat"] != "waiting"]
        assert names == PLAN[1].text(rank) * 3
    sizes = {event["args"].get("received_bytes", 0) for event in events}
    assert sizes == {0, 2 * 16 * 16 * 4}  # sequences, length, width, bytes of a float


def test_plans_take_turns_as_if_alone(alone: tuple[Path, list[str]], plan_file: Path, tmp_path: Path) -> None:
    """Two placements take turns step by step; each trains its own copy of the model."""
    expected = summarise(read_reports(alone[0] / "results", 2)).losses
    assert len(expected) == 3
    assert expected[-1] < expected[0]

    other = write_plan(tmp_path / "loop.json", *baseline("interleaved-1f1b", unit_problem(2, 4)))
    folder = tmp_path / "turns"
    both = ["--plan-file", str(other), "--result-dir", str(folder), "--threads", "1"]
    arguments = run_arguments(plan_file, *both)
    with ranks([arguments] * 2, tmp_path / "logs") as started:
        started.wait(timeout=240)
    for path in (plan_file, other):
        found = summarise(read_reports(folder / identity_in(path), 2))
        assert found.losses == pytest.approx(expected, rel=1e-5)
        assert len(found.step_seconds) == 3


def identity_in(path: Path) -> str:
    plan_id: str = json.loads(path.read_text())["plan_id"]
    return plan_id


def test_results_are_written_before_groups_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang() -> None:
        raise KeyboardInterrupt

    report, failures = RankReport("plan", 0), MagicMock()
    failures.return_value.close_transport.side_effect = hang
    monkeypatch.setattr(run, "_prepare", lambda *_: (torch.device("cpu"), [], object()))
    monkeypatch.setattr(run, "train", lambda *_: [report])
    monkeypatch.setattr(run, "open_transport", Mock())
    monkeypatch.setattr(run, "GlooControl", Mock())
    monkeypatch.setattr(run, "Failures", failures)
    with pytest.raises(KeyboardInterrupt):
        run.run(RunOptions((), ModelSpec("a:b"), 1, threads=1, result_dir=tmp_path), World(0, 1, 0))
    assert [found["rank"] for found in read_reports(tmp_path, 1)] == [0]


def test_a_rank_that_cannot_start_ends_the_others_with_its_reason(plan_file: Path, tmp_path: Path) -> None:
    other = write_plan(tmp_path / "one.json", *random_plan(1, 4))
    each = [run_arguments(plan, timeout=600) for plan in (plan_file, other)]
    with ranks(each, tmp_path / "logs") as started:
        with pytest.raises(LaunchError, match="the plan has 1 ranks"):
            started.wait(timeout=240)
        until_said(started, "zbv-worker:")
        said = "rank 0, meeting the other ranks: rank 1 cannot start: found rank 1; the plan has 1 ranks"
        assert said in started.log(0)
        assert "Traceback" not in started.log(0) + started.log(1)


def test_a_rank_that_does_not_start_is_named_within_the_timeout(plan_file: Path, tmp_path: Path) -> None:
    arguments = run_arguments(plan_file, "--startup-timeout", "2", timeout=2)
    there = python_command("zbv_worker.commands.cli", *arguments)
    absent = [sys.executable, "-c", "import time; time.sleep(600)"]
    with (
        LocalRanks([there, absent], tmp_path / "logs") as started,
        pytest.raises(LaunchError, match=r"meeting the other ranks: rank 1 of 2 did not start within 2 s"),
    ):
        started.wait(timeout=240)


def test_an_absent_rank_of_a_collective_is_named_on_every_other_rank(tmp_path: Path) -> None:
    found = found_by("worker.run.test_run", 3, tmp_path)
    for what, said in (
        ("barrier", "Ranks 2 failed to pass"),
        ("ranks", "rank 1 did not take part"),
        ("replicas", "rank 2 did not take part"),
    ):
        assert [said in rank[what] for rank in found] == [rank != LATE[what] for rank in range(3)], found


@pytest.fixture
def as_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set torchrun's variables for the only rank of a run."""
    for name, value in rank_environment(0, 1, 1).items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "x"], "no plan given"),
        (["--model", "x", "--plan", "plan.json"], "no server given that has plan.json; pass --plan"),
        (["--plan-file", "absent.json", "--model", "x"], "No such file"),
        (["--plan-file", "PLAN", "--model", "gpt"], "must be package.module:factory"),
        (["--plan-file", "PLAN", "--model", "nowhere.at:all"], "found no module 'nowhere'"),
        (["--plan-file", "PLAN", "--model", "json:dumps", "--model-args", "[1]"], "must be a JSON object"),
        (["--plan-file", "PLAN", "--model", "json:dumps", "--model-args", "{"], "must be a JSON object"),
    ],
)
def test_wrong_arguments_give_a_message_and_status_2(
    arguments: list[str], message: str, plan_file: Path, as_rank_0: None, capsys: pytest.CaptureFixture[str]
) -> None:
    replaced = [str(plan_file) if argument == "PLAN" else argument for argument in arguments]
    assert main(["run", *replaced, "--timeout", "1"]) == 2
    assert message in capsys.readouterr().err


def test_a_service_without_an_answer_is_a_lost_peer(
    as_rank_0: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZBV_SERVER", "http://127.0.0.1:9")
    assert main(["run", "--plan", "a", "--model", "zbv_worker.models.gpt:gpt", "--timeout", "1"]) == 1
    assert "rank 0: no action list of plan a from http://127.0.0.1:9" in capsys.readouterr().err


def test_without_torchrun_the_message_says_how_to_start(
    plan_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(run_arguments(plan_file)) == 2
    assert "torchrun" in capsys.readouterr().err


def test_a_broken_plan_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    for text in ("{", "{}", '{"problem": {}, "ranks": []}'):
        path.write_text(text)
        with pytest.raises(InvalidRun, match=re.escape(str(path))):
            PlanSource(file=path).rank_plan(0, 1.0)
    problem = unit_problem(2, 1)
    orders = Orders.from_text([["0F0", "3F0", "3B0", "0B0"], ["2F0", "1F0", "2B0", "1B0"]])
    write_plan(path, problem, orders)
    with pytest.raises(InvalidRun, match=r"2F0|deadlock"):
        PlanSource(file=path).rank_plan(0, 1.0)
    write_plan(path, *random_plan(2, 1))
    with pytest.raises(InvalidRun, match="found rank 2; the plan has 2 ranks"):
        PlanSource(file=path).rank_plan(2, 1.0)
