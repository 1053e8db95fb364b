"""A run that loses a node resumes from its checkpoints; one with wrong costs changes to another plan."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
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


@dataclass(frozen=True)
class Disturbed:
    """What a run left behind that first lost a stopped agent, then a killed one, then a rank."""

    run: Run
    stopped: AgentProcess
    killed: AgentProcess
    last: AgentProcess
    """The agent of the rank that was killed last."""
    checkpoint_after_stop: Path | None
    names_after_kill: set[str]


@pytest.fixture(scope="module")
def disturbed(three: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Disturbed:
    """Disturb one run three times; its two retries replace the agents, and the killed rank ends it."""
    saved = tmp_path_factory.mktemp("saved")
    model = DROPOUT | {"pause": 0.05}
    run = three.submit(model=model, retries=2, checkpoint={"directory": str(saved), "every": 3})
    until_generation(three, run, 0, 3)
    stopped = busy(three)[0]
    ranks = [pid for pid, command in stopped.descendants().items() if "agent.rank" in command]
    os.kill(stopped.process.pid, signal.SIGSTOP)
    try:
        until(lambda: not any(map(is_alive, ranks)), three.story)
        until_generation(three, run, 1, 6)
    finally:
        os.kill(stopped.process.pid, signal.SIGCONT)
    until(lambda: len(three.names()) == 3, three.story)  # it registers again, with a new id
    assert not stopped.descendants()
    newest = newest_checkpoint(saved)

    killed = busy(three)[1]
    processes = list(killed.descendants())
    assert len(processes) == 2
    killed.process.kill()  # its launcher and its rank die with it, so nothing on this node can report
    killed.process.wait(timeout=DEADLINE)
    until_generation(three, run, 2, 6)
    assert not any(map(is_alive, processes))
    names = three.names()

    assert three.client.run(run.id).state == "running"
    last = busy(three)[1]
    os.kill(last.rank(), signal.SIGKILL)
    ended = three.client.wait_run(run.id, DEADLINE)
    until(lambda: not busy(three), three.story)
    return Disturbed(ended, stopped, killed, last, newest, names)


def test_a_stopped_agents_ranks_end_and_a_resumed_agent_harms_no_successor(
    disturbed: Disturbed,
) -> None:
    assert disturbed.checkpoint_after_stop is not None
    assert disturbed.checkpoint_after_stop.name.endswith(".g2")
    assert re.search("ended its ranks|ended because its agent has been silent", disturbed.stopped.log)


def test_a_lost_agent_is_named_and_its_run_is_retried(three: Cluster, disturbed: Disturbed) -> None:
    assert disturbed.names_after_kill == {agent.name for agent in three.agents} - {disturbed.killed.name}
    retries = [event for event in three.client.run_events(disturbed.run.id) if event["kind"] == "retry"]
    assert [re.findall(r"\d of 2", retry["detail"]) for retry in retries] == [["1 of 2"], ["2 of 2"]]
    detail = retries[1]["detail"]
    assert f"agent {disturbed.killed.name}" in detail
    assert "gave no sign of life for 12 s; last reported steps: rank" in detail


def test_every_retry_goes_on_from_a_checkpoint_with_the_losses_of_an_undisturbed_run(
    three: Cluster, disturbed: Disturbed, tmp_path: Path
) -> None:
    found = [logged(three, disturbed.run, generation) for generation in range(3)]
    for before, after in pairwise(found):
        assert 3 <= min(after) <= max(before) + 1
        assert min(after) % 3 == 0
    expected = undisturbed(tmp_path / "undisturbed", max(map(max, found)) + 1)
    for losses in found:
        assert losses == {step: round(expected[step], 4) for step in losses}


def test_a_killed_rank_is_named_and_ends_a_run_without_retries_left(disturbed: Disturbed) -> None:
    """Also: no process of the run is left on any node, or the fixture would not end."""
    run, agent = disturbed.run, disturbed.last.name
    assert run.state == "failed"
    (rank,) = (node["node_rank"] for node in run.document["members"] if node["agent"] == agent)
    cause = run.failures[0]
    assert (cause["kind"], cause["agent"], cause["rank"]) == ("killed", agent, rank), run.failures
    assert f"rank {rank} was killed by SIGKILL; it last reported step" in cause["detail"]
