"""A run that loses a node goes on from its checkpoints; one with wrong costs, with another plan."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.agents import DEADLINE, FACTORY, MODEL, AgentProcess, Cluster, a_plan, cluster, is_alive, until
from zbv_service.client import NotFound, Run
from zbv_solver.plans.plan import plan_json
from zbv_worker.host.local_ranks import LocalRanks, python_command
from zbv_worker.training.checkpoint import newest_checkpoint

pytestmark = pytest.mark.timeout(900)

DROPOUT = {"dropout": 0.1}
"""Random numbers, too, must go on where they were."""


def undisturbed(folder: Path, steps: int) -> dict[int, float]:
    """Losses by step of the same run without agents."""
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps(plan_json(a_plan())))
    command = python_command(
        "zbv_worker",
        *("run", "--plan-file", str(folder / "plan.json"), "--model", FACTORY),
        *(
            "--model-args",
            json.dumps(MODEL | DROPOUT | {"pause": 0.0}),
            "--steps",
            str(steps),
            "--threads",
            "1",
        ),
        *("--result-dir", str(folder)),
    )
    with LocalRanks([command] * 2, folder / "logs") as ranks:
        ranks.wait(timeout=DEADLINE)
    return {
        step["step"]: step["loss"]
        for path in folder.glob("rank-*.json")
        for step in json.loads(path.read_text())["steps"]
        if step["loss"] is not None
    }


def logged(started: Cluster, run: Run, generation: int) -> dict[int, float]:
    """Losses by step as a generation's ranks said them, to four decimals."""
    folders = [agent.folder / "state" / run.id / str(generation) / "logs" for agent in started.agents]
    text = "".join(path.read_text() for folder in folders for path in folder.rglob("std*.log"))
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", text)}


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A service and three agents, of which a run needs two.

    They are given time: one that is held for lost because the machine is busy would use up a retry.
    """
    with cluster(tmp_path_factory.mktemp("three"), agent_timeout_seconds=12.0) as started:
        for name in ("one", "two", "three"):
            started.start(name)
        until(lambda: len(started.names()) == 3, started.story)
        yield started


def busy(started: Cluster) -> list[AgentProcess]:
    """The agents that have ranks."""
    return [agent for agent in started.agents if agent.process.poll() is None and agent.descendants()]


def until_generation(started: Cluster, run: Run, generation: int, step: int) -> None:
    """Wait until all ranks of a generation are past a step."""

    def holds() -> bool:
        found = started.client.run(run.id)
        assert not found.is_finished, (found.document, started.story())
        ranks = [rank for node in found.document["members"] for rank in node["ranks"]]
        is_there = found.document["generation"] == generation and len(ranks) == 2
        return is_there and all((rank["step"] or 0) > step for rank in ranks)

    until(holds, started.story)


def trace_of(started: Cluster, run: Run) -> dict[str, Any]:
    """The merged trace, empty while the ranks have no step in common."""
    try:
        return started.client.run_trace(run.id)
    except NotFound:
        return {}


def test_a_plan_made_for_wrong_costs_is_replaced_by_a_better_one_in_mid_run(three: Cluster) -> None:
    """The plan is in no good order, and for equal stages, which the first and the last are not."""
    run = three.submit(model={"pause": 0.02}, replan="auto")

    def has_swapped() -> bool:
        found = three.client.run(run.id)
        assert not found.is_finished, (found.document, three.story())
        return found.plan_id != run.plan_id

    until(has_swapped, three.story)
    found = three.client.run(run.id)
    kinds = [event["kind"] for event in three.client.run_events(run.id)]
    assert kinds.index("offer") < kinds.index("swapped")
    until(lambda: "traceEvents" in trace_of(three, run), three.story)
    names = {event["name"] for event in trace_of(three, run)["traceEvents"]}
    assert {"0F0", "3F3"} <= names
    three.client.cancel_run(run.id)
    assert three.client.wait_run(run.id, DEADLINE).state == "cancelled"
    until(lambda: not busy(three), three.story)
    log = three.client.rank_log(run.id, 0)
    assert f"changing from plan {str(run.plan_id)[:12]}" in log
    assert str(found.plan_id)[:12] in log


def test_an_agent_that_is_stopped_takes_its_ranks_along_and_harms_no_successor_when_it_resumes(
    three: Cluster, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    run = three.submit(retries=1, checkpoint={"directory": str(saved), "every": 3}, model={"pause": 0.02})
    until_generation(three, run, 0, 3)
    stopped = busy(three)[0]
    ranks = [pid for pid, command in stopped.descendants().items() if "agent.rank" in command]
    os.kill(stopped.process.pid, signal.SIGSTOP)
    try:
        until(lambda: not any(map(is_alive, ranks)), three.story)
        until_generation(three, run, 1, 6)
    finally:
        os.kill(stopped.process.pid, signal.SIGCONT)
    until(lambda: len(three.names()) == 3, three.story)  # under a new id
    assert not stopped.descendants()
    newest = newest_checkpoint(saved)
    assert newest is not None
    assert newest.name.endswith(".g2")
    assert three.client.run(run.id).state == "running"
    three.client.cancel_run(run.id)
    assert three.client.wait_run(run.id, DEADLINE).state == "cancelled"
    until(lambda: not busy(three), three.story)
    assert re.search("ended its ranks|ended itself: its agent has given no sign of life", stopped.log)


def test_a_killed_agent_is_lost_by_name_and_the_run_goes_on_elsewhere_as_if_undisturbed(
    three: Cluster, tmp_path: Path
) -> None:
    """Last: one of the three is lost."""
    checkpoint = {"directory": str(tmp_path / "saved"), "every": 3}
    run = three.submit(model=DROPOUT, retries=1, checkpoint=checkpoint)
    until_generation(three, run, 0, 3)
    dead = busy(three)[1]
    left_behind = list(dead.descendants())
    assert len(left_behind) == 2
    dead.process.kill()  # its launcher and its rank die with it: nobody is left there who could tell
    dead.process.wait(timeout=DEADLINE)
    until_generation(three, run, 1, 6)
    assert three.names() == {agent.name for agent in three.agents} - {dead.name}
    three.client.cancel_run(run.id)
    assert three.client.wait_run(run.id, DEADLINE).state == "cancelled"
    until(lambda: not busy(three) and not any(map(is_alive, left_behind)), three.story)

    found = [logged(three, run, generation) for generation in range(2)]
    assert 3 <= min(found[1]) <= max(found[0]) + 1  # it went on from a checkpoint, not from the start
    assert min(found[1]) % 3 == 0
    expected = undisturbed(tmp_path / "undisturbed", max(found[1]) + 1)
    for losses in found:
        assert losses == {step: round(expected[step], 4) for step in losses}
    (retry,) = [event["detail"] for event in three.client.run_events(run.id) if event["kind"] == "retry"]
    assert "1 of 1" in retry
    assert f"agent {dead.name}" in retry
    assert "gave no sign of life for 12 s; last reported steps: rank" in retry
