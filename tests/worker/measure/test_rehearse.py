"""``zbv-worker rehearse`` on real processes: it completes in the plan's order, and names what fails."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from support.selfcheck import random_orders
from support.thread_transport import ThreadHub, ThreadTransport
from zbv_service.client import Client
from zbv_service.client.retries import DEFAULT_RETRIES
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import plan_json
from zbv_solver.problem.problem import Objective, Problem, Units
from zbv_solver.problem.reading import parse_problem
from zbv_solver.problem.writing import problem_json
from zbv_solver.search.assemble import make_plan
from zbv_worker.commands.cli import main
from zbv_worker.errors import Disagreement, InvalidRun
from zbv_worker.execution.plan_source import PlanSource, WholePlan
from zbv_worker.host.local_ranks import LocalRanks, python_command
from zbv_worker.measure.rehearse.rehearse import RehearseOptions, rehearse_on, sleeping_stages
from zbv_worker.measure.rehearse.sleeping_stage import SleepingDevice


def problem_of(p: int, microbatches: int, objective: Objective = "span") -> Problem:
    costs = {"forward": 2, "backward_input": 2, "backward_weight": 1}
    document = {"pp_degree": p, "microbatches": microbatches, "costs": costs}
    return parse_problem({**document, "objective": objective, "units": {"time": "ms"}})


def write_plan(path: Path, problem: Problem, seed: int) -> Path:
    plan = make_plan(problem, random_orders(problem, Random(seed)), method="random")
    path.write_text(json.dumps(plan_json(plan)))
    return path


class Finished(NamedTuple):
    """The result of a command."""

    returncode: int
    stdout: str
    stderr: str


Rehearse = Callable[..., Finished]


def test_an_action_takes_the_time_that_its_microbatch_needs() -> None:
    taken: list[int] = []

    class Recording(SleepingDevice):
        def take(self, nanoseconds: int, arrival: int | None = None) -> int:
            taken.append(nanoseconds)
            return 0

    costs = {"forward": {"fixed": 2, "tokens": 1}, "backward_input": {"tokens": 3}, "backward_weight": 4}
    document = {"pp_degree": 1, "microbatches": 3, "features": {"tokens": [1, 5, 1]}, "costs": costs}
    problem = parse_problem(document)
    orders = random_orders(problem, Random(0))
    plan = WholePlan("plan", problem, orders, 0.0)
    stage = sleeping_stages(plan, 0, 1e-9, 8, Recording())[1]
    gradient = torch.zeros(1)
    for microbatch in range(3):
        stage.forward(microbatch, gradient, split=True)
        stage.backward_input(microbatch, gradient)
        stage.backward_weight(microbatch)
        stage.backward(microbatch, gradient)
    assert taken == [3, 3, 4, 7, 7, 15, 4, 19, 3, 3, 4, 7]


@pytest.fixture
def rehearse(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Rehearse]:
    """Runs the command in this process."""
    monkeypatch.delenv("RANK", raising=False)
    handler = signal.getsignal(signal.SIGTERM)

    def run(*arguments: object) -> Finished:
        capsys.readouterr()
        status = main(["rehearse", *map(str, arguments)])
        return Finished(status, *capsys.readouterr())

    yield run
    signal.signal(signal.SIGTERM, handler)


def actions_of(document: dict[str, Any], rank: int) -> list[str]:
    events = [event for event in document["traceEvents"] if event["ph"] == "X" and event["tid"] == rank]
    return [event["name"] for event in events if event["cat"] != "waiting"]


@pytest.mark.parametrize(("p", "objective"), [(2, "makespan"), (4, "span")])
def test_a_plan_is_executed_in_its_order_and_compared_with_the_planned_times(
    rehearse: Rehearse, tmp_path: Path, p: int, objective: Objective
) -> None:
    path = write_plan(tmp_path / "plan.json", problem_of(p, 3, objective), seed=p)
    files = ("--json", tmp_path / "numbers.json", "--trace", tmp_path / "trace.json")
    finished = rehearse("--plan-file", path, "--steps", 2, "--bytes", 5000, *files)
    assert finished.returncode == 0, finished.stderr
    assert re.search(rf"{objective} of plan \w+: planned .* ms, measured .* ms", finished.stdout)

    plan = WholePlan.of_file(path)
    trace = json.loads((tmp_path / "trace.json").read_text())
    for rank in range(p):
        assert actions_of(trace, rank) == plan.orders.text(rank) * 3  # including the warm-up
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["args"].get("received_bytes", 0) for event in events} == {0, 5000}

    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert numbers["planned"] == pytest.approx(plan.objective_value / 1e3)
    assert len(numbers["steps"]) == 2
    for rank, times in enumerate(numbers["ranks"]):
        assert times["planned_busy"] == pytest.approx(plan.busy(rank) / 1e3)
        # A sleep is never too short, but it may hide the executor's work before it, and time in which the
        # rank was off its core while it looked for a tensor.
        unplanned = max(0.0, times["waiting"] - times["planned_waiting"])
        assert times["busy"] + times["between"] + unplanned >= times["planned_busy"] * 0.99
    assert numbers["measured"] >= min(times["planned_busy"] for times in numbers["ranks"])

    # One host has one clock, so the measured difference is the method's error.
    other = trace["otherData"]
    assert max(map(abs, other["clocks_ahead_us"])) <= 2 * other["clock_uncertainty_us"]


def test_ranks_with_different_plans_refuse_by_name() -> None:
    problem = problem_of(2, 3)

    def rehearsed(transport: ThreadTransport) -> object:
        plan = WholePlan(f"{transport.rank}" * 64, problem, random_orders(problem, Random(0)), 1.0)
        return rehearse_on(transport, options(1e-9), plan, plan.of_rank(transport.rank))

    with pytest.raises(Disagreement, match=r"plan id \(rank 0: 0+…; rank 1: 1+…"):
        ThreadHub(2).run(rehearsed)


def test_the_overhead_is_measured_with_actions_that_take_no_time(rehearse: Rehearse, tmp_path: Path) -> None:
    path = write_plan(tmp_path / "plan.json", problem_of(2, 3), seed=0)
    numbers = tmp_path / "numbers.json"
    finished = rehearse("--plan-file", path, "--overhead", "--bytes", 64, "--json", numbers)
    assert finished.returncode == 0, finished.stderr
    assert re.fullmatch(
        r"CPU time per action, without the sleeps: [\d.]+ [mµn]s .*, [\d.]+ [mµn]s .*\n", finished.stdout
    )
    found = json.loads(numbers.read_text())
    assert found["planned"] == 0
    assert found["ratio"] is None
    assert 0 < found["cpu_thread"] <= found["cpu_process"]


def test_in_the_environment_of_torchrun_it_is_one_of_the_ranks(tmp_path: Path) -> None:
    """``end_to_end/test_clusters.py`` tests it under torchrun itself."""
    path = write_plan(tmp_path / "plan.json", problem_of(2, 2), seed=0)
    command = python_command("zbv_worker", "rehearse", "--plan-file", str(path), "--steps", "1")
    with LocalRanks([command] * 2, tmp_path / "logs") as started:
        started.wait(timeout=240)
    assert [started.log(rank).count("measured") for rank in range(2)] == [1, 0]  # rank 0 alone reports


def test_a_late_tensor_is_named_with_rank_action_and_peer(rehearse: Rehearse, tmp_path: Path) -> None:
    """Rank 0 sleeps for much longer than rank 1 waits for its first input."""
    path = write_plan(tmp_path / "plan.json", problem_of(2, 1), seed=0)
    finished = rehearse("--plan-file", path, "--scale", 60, "--timeout", 5)
    assert finished.returncode == 1
    said = "rank 1 waited 5 s at 1F0 for the activation of 0F0 from rank 0, which did not arrive"
    assert said in finished.stderr
    assert "Traceback" not in finished.stderr


def test_a_plan_with_a_deadlock_is_refused(rehearse: Rehearse, tmp_path: Path) -> None:
    orders = Orders.from_text([["0F0", "3F0", "3B0", "0B0"], ["2F0", "1F0", "2B0", "1B0"]])
    document = {"problem": problem_json(problem_of(2, 1)), "ranks": orders.all_text()}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    finished = rehearse("--plan-file", path)
    assert finished.returncode == 2
    assert re.search("2F0|deadlock", finished.stderr)


def test_without_an_answer_of_the_service_in_zbv_server_the_status_is_1(
    rehearse: Rehearse, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []

    class Watched(Client):
        def __init__(self, server: str, timeout: float):
            given.append(timeout * (1 + DEFAULT_RETRIES))
            super().__init__(server, timeout=timeout)

    monkeypatch.setattr("zbv_service.client.Client", Watched)
    monkeypatch.setenv("ZBV_SERVER", "http://127.0.0.1:9")
    finished = rehearse("--plan", "ab", "--timeout", 1.5)
    assert (finished.returncode, "no plan ab from http://127.0.0.1:9" in finished.stderr) == (1, True)
    assert given == [1.5], "all attempts together keep the timeout"


def options(scale: float | None = None) -> RehearseOptions:
    return RehearseOptions(PlanSource(), scale=scale)


def test_a_time_unit_comes_from_the_caller_the_problem_or_10_ms_actions() -> None:
    problem = problem_of(2, 2)
    orders = random_orders(problem, Random(1), fused=0.0)
    plan = WholePlan("aa", problem, orders, 1.0)
    assert options(0.5).seconds_per_unit(plan) == 0.5
    assert options().seconds_per_unit(plan) == pytest.approx(1e-3)
    unnamed = replace(problem, units=Units())
    # Actions of 2, 2 and 1 units: a mean of 5/3.
    assert options().seconds_per_unit(WholePlan("aa", unnamed, orders, 1.0)) == pytest.approx(0.006)


def test_stated_metrics_are_checked_and_absent_ones_computed(tmp_path: Path) -> None:
    path = write_plan(tmp_path / "plan.json", problem_of(2, 2), seed=1)
    document = json.loads(path.read_text())
    stated = document["metrics"]["span"]
    path.write_text(json.dumps({key: document[key] for key in ("problem", "ranks")}))
    assert WholePlan.of_file(path).objective_value == pytest.approx(stated)
    document["metrics"]["span"] = stated / 2
    path.write_text(json.dumps(document))
    with pytest.raises(InvalidRun, match="span"):
        WholePlan.of_file(path)


def test_a_plan_with_copies_to_the_host_is_refused_before_any_rank_starts(tmp_path: Path) -> None:
    costs = {"forward": 1, "backward_input": 1, "backward_weight": 1, "offload": 1}
    problem = {"pp_degree": 1, "microbatches": 1, "placement": "single", "costs": costs}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"problem": problem, "ranks": [["0F0", "0O0", "0D0", "0R0", "0B0"]]}))
    with pytest.raises(InvalidRun, match="copies activations to the host"):
        RehearseOptions(PlanSource(file=path)).plan()
