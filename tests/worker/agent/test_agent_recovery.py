"""A run that loses an agent resumes from a checkpoint; a run with wrong costs changes to another plan."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.agents import AGENT_TIMEOUT, FACTORY, MODEL, AgentProcess, Cluster, a_plan, cluster, until
from support.processes import DEADLINE, is_alive
from zbv_service.client import NotFound, Run
from zbv_solver.plans.plan import plan_json
from zbv_worker.checkpoints.checkpoint import newest_checkpoint
from zbv_worker.host.local_ranks import LocalRanks, python_command

pytestmark = pytest.mark.timeout(900)


DROPOUT = {"dropout": 0.1}
"""The generators of random numbers must resume, too."""


def undisturbed(folder: Path, steps: int) -> dict[int, float]:
    """Losses by step of the same run without agents, in which nothing fails."""
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps(plan_json(a_plan())))
    model = json.dumps(MODEL | DROPOUT | {"pause": 0.0})
    command = python_command(
        "zbv_worker",
        *("run", "--plan-file", str(folder / "plan.json"), "--model", FACTORY, "--model-args", model),
        *("--steps", str(steps), "--threads", "1", "--result-dir", str(folder)),
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
    """Losses by step in the logs of a generation's ranks, to four decimals."""
    folders = [agent.folder / "state" / run.id / str(generation) / "logs" for agent in started.agents]
    text = "".join(path.read_text() for folder in folders for path in folder.rglob("std*.log"))
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", text)}


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A service and three agents, of which a run needs two."""
    with cluster(tmp_path_factory.mktemp("three")) as started:
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


def generation_of(checkpoint: Path | None) -> int | None:
    """The generation of ranks that wrote a checkpoint, counted from 1."""
    return None if checkpoint is None else int(checkpoint.name.rpartition(".g")[2])


def trace_of(started: Cluster, run: Run) -> dict[str, Any]:
    """The merged trace; empty while there is no step that all ranks have sent."""
    try:
        return started.client.run_trace(run.id)
    except NotFound:
        return {}


@dataclass(frozen=True)
class Disturbed:
    """A run whose first generation lost a stopped agent, and whose second lost a killed rank."""

    run: Run
    stopped: AgentProcess
    """The agent that was stopped, and continued while the second generation was running."""
    bereaved: AgentProcess
    """The agent of the killed rank."""
    registered: set[str]
    """The registered agents while the second generation was running, before the stopped one continued."""
    newest: Path | None
    """The newest checkpoint after the stopped agent had registered again."""


@pytest.fixture(scope="module")
def disturbed(three: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Disturbed:
    """Disturb a run with one retry: stop an agent, later kill a rank, which ends the run."""
    saved = tmp_path_factory.mktemp("saved")
    model = DROPOUT | {"pause": 0.05}
    run = three.submit(model=model, retries=1, checkpoint={"directory": str(saved), "every": 3})
    until_generation(three, run, 0, 3)
    stopped = busy(three)[0]
    ranks = stopped.ranks()
    os.kill(stopped.process.pid, signal.SIGSTOP)
    try:
        until(lambda: not any(map(is_alive, ranks)), three.story)
        until_generation(three, run, 1, 3)
        until(lambda: generation_of(newest_checkpoint(saved)) == 2, three.story)
        registered = three.names()
    finally:
        os.kill(stopped.process.pid, signal.SIGCONT)
    until(lambda: len(three.names()) == 3, three.story)  # it registers again, with a new id
    assert not stopped.descendants()
    newest = newest_checkpoint(saved)

    assert three.client.run(run.id).state == "running"
    bereaved = busy(three)[1]
    os.kill(bereaved.rank(), signal.SIGKILL)
    ended = three.client.wait_run(run.id, DEADLINE)
    until(lambda: not busy(three), three.story)
    return Disturbed(ended, stopped, bereaved, registered, newest)


def test_a_stopped_agents_ranks_end_and_it_leaves_its_successors_checkpoints_alone(
    disturbed: Disturbed,
) -> None:
    assert generation_of(disturbed.newest) == 2
    assert re.search("ended its ranks|ended because its agent has been silent", disturbed.stopped.log)


def test_a_lost_agent_is_named_and_its_run_is_retried(three: Cluster, disturbed: Disturbed) -> None:
    assert disturbed.registered == {agent.name for agent in three.agents} - {disturbed.stopped.name}
    (retry,) = (event for event in three.client.run_events(disturbed.run.id) if event["kind"] == "retry")
    assert "1 of 1" in retry["detail"]
    assert f"agent {disturbed.stopped.name}" in retry["detail"]
    assert f"gave no sign of life for {AGENT_TIMEOUT:g} s; last reported steps: rank" in retry["detail"]


def test_a_retry_resumes_from_a_checkpoint_with_the_losses_of_an_undisturbed_run(
    three: Cluster, disturbed: Disturbed, tmp_path: Path
) -> None:
    before, after = (logged(three, disturbed.run, generation) for generation in range(2))
    assert 3 <= min(after) <= max(before) + 1
    assert min(after) % 3 == 0
    expected = undisturbed(tmp_path / "undisturbed", max(*before, *after) + 1)
    for losses in (before, after):
        assert losses == {step: round(expected[step], 4) for step in losses}


def test_a_killed_rank_is_named_and_ends_a_run_without_retries_left(disturbed: Disturbed) -> None:
    """The fixture has also waited until no process of the run is left on any node."""
    run, agent = disturbed.run, disturbed.bereaved.name
    assert run.state == "failed"
    (rank,) = (node["node_rank"] for node in run.document["members"] if node["agent"] == agent)
    cause = run.failures[0]
    assert (cause["kind"], cause["agent"], cause["rank"]) == ("killed", agent, rank), run.failures
    assert f"rank {rank} was killed by SIGKILL; it last reported step" in cause["detail"]


def test_a_plan_for_wrong_costs_is_replaced_by_a_better_one_during_the_run(three: Cluster) -> None:
    """The plan's order is random, and it assumes equal stages, but the first and the last differ."""
    run = three.submit(model={"pause": 0.02}, replan="auto")

    def has_changed() -> bool:
        found = three.client.run(run.id)
        assert not found.is_finished, (found.document, three.story())
        return found.plan_id != run.plan_id

    until(has_changed, three.story)
    found = three.client.run(run.id)
    kinds = [event["kind"] for event in three.client.run_events(run.id)]
    assert kinds.index("offer") < kinds.index("swapped")
    until(lambda: "traceEvents" in trace_of(three, run), three.story)
    names = {event["name"] for event in trace_of(three, run)["traceEvents"]}
    assert {"0F0", "3F3"} <= names
    three.client.cancel_run(run.id)
    assert three.client.wait_run(run.id, DEADLINE).state == "cancelled"
    until(lambda: not busy(three), three.story)
    change = f"changing from plan {str(run.plan_id)[:12]}"
    until(lambda: change in (log := three.client.rank_log(run.id, 0)) and str(found.plan_id)[:12] in log)


def test_the_launcher_and_the_rank_of_a_killed_agent_die_with_it(three: Cluster) -> None:
    run = three.submit()
    until(lambda: any(len(agent.descendants()) == 2 for agent in busy(three)), three.story)
    agent = next(agent for agent in busy(three) if len(agent.descendants()) == 2)
    processes = agent.descendants()
    agent.process.kill()
    agent.process.wait(timeout=DEADLINE)
    until(lambda: not any(map(is_alive, processes)), three.story)
    logs = "".join(path.read_text() for path in (agent.folder / "state" / run.id).rglob("std*.log"))
    assert "has been silent" not in logs, "the rank ended only because its agent was silent"
    three.client.cancel_run(run.id)
