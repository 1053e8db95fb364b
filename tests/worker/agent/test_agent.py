"""A service and agents as processes: runs that wait, fail, resume, change their plan, and succeed."""

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
from support.agents import (
    AGENT_TIMEOUT,
    FACTORY,
    MODEL,
    AgentProcess,
    Cluster,
    a_plan,
    cluster,
    read_losses,
    until,
)
from support.paths import TESTS
from support.processes import DEADLINE, is_alive
from zbv_service.client import NotFound, Run
from zbv_solver.plans.plan import plan_json
from zbv_worker.checkpoints.checkpoint import newest_checkpoint
from zbv_worker.commands.cli import main
from zbv_worker.host.local_ranks import LocalRanks, python_command

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A service without agents."""
    with cluster(tmp_path_factory.mktemp("cluster")) as found:
        yield found


def busy(started: Cluster) -> list[AgentProcess]:
    """The agents that have ranks."""
    return [agent for agent in started.agents if agent.process.poll() is None and agent.descendants()]


def node_rank_of(run: Run, name: str) -> int:
    return next(int(node["node_rank"]) for node in run.document["members"] if node["agent"] == name)


def test_a_run_waits_while_no_agent_allows_its_model(started: Cluster) -> None:
    """The first test, because other agents would take the run."""
    agents = [started.start("wary", allow=None), started.start("choosy", allow="another.*")]
    until(lambda: started.names() == {"wary", "choosy"}, started.story)
    run = started.submit()
    until(lambda: "2 not allowing the model" in (started.client.run(run.id).document["waits_for"] or ""))
    assert started.client.cancel_run(run.id).state == "cancelled"
    assert not busy(started)
    made = [path for agent in agents for path in (agent.folder / "state").iterdir() if path.is_dir()]
    assert made == [], "an agent prepared a run that it may not load"
    for agent in agents:
        agent.process.terminate()
        assert agent.process.wait(timeout=DEADLINE) == 0, agent.log
    assert started.names() == set()


@pytest.fixture(scope="module")
def three(started: Cluster) -> Cluster:
    """Three agents for several runs, of which each needs two: no run may disturb the next one."""
    names = {"one", "two", "three"}
    for name in names:
        started.start(name)
    until(lambda: started.names() == names, started.story)
    return started


def submit(three: Cluster, **options: Any) -> Run:
    """Submit a run to idle agents."""
    alive = {agent.name for agent in three.agents if agent.process.poll() is None}
    until(lambda: {agent["name"]: agent["run_id"] for agent in three.client.agents()} == dict.fromkeys(alive))
    return three.submit(**options)


def test_a_rank_that_hangs_is_named_by_the_one_that_waits_for_it(three: Cluster) -> None:
    run = submit(three, timeout=15)
    three.until_step(run, 2)
    waiting, hanging = busy(three)
    os.kill(hanging.rank(), signal.SIGSTOP)
    ended = three.client.wait_run(run.id, DEADLINE)
    assert ended.state == "failed", three.story()
    cause, peer = ended.failures[0], node_rank_of(ended, hanging.name)
    assert (cause["kind"], cause["agent"], cause["peer"]) == ("peer", waiting.name, peer), ended.failures
    assert cause["action"] in cause["detail"]
    assert cause["step"] >= 3
    until(lambda: not busy(three), three.story)


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


def log_of(started: Cluster, run: Run, rank: int) -> str:
    """The log of a rank; empty while the agent has not sent it."""
    try:
        return started.client.rank_log(run.id, rank)
    except NotFound:
        return ""


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
    run = submit(three, model=model, retries=1, checkpoint={"directory": str(saved), "every": 3})
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


def test_a_stopped_agent_ends_its_ranks_and_leaves_its_successor_alone(disturbed: Disturbed) -> None:
    assert generation_of(disturbed.newest) == 2
    assert re.search("ended its ranks|ended because its agent has been silent", disturbed.stopped.log)


def test_a_lost_agent_is_named_and_its_run_is_retried(three: Cluster, disturbed: Disturbed) -> None:
    assert disturbed.registered == three.names() - {disturbed.stopped.name}
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
    rank = node_rank_of(run, agent)
    cause = run.failures[0]
    assert (cause["kind"], cause["agent"], cause["rank"]) == ("killed", agent, rank), run.failures
    assert f"rank {rank} was killed by SIGKILL; it last reported step" in cause["detail"]


def test_a_plan_for_wrong_costs_is_replaced_by_a_better_one_during_the_run(three: Cluster) -> None:
    """The plan's order is random, and it assumes equal stages, but the first and the last differ."""
    run = submit(three, model={"pause": 0.02}, replan="auto")

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
    until(lambda: change in (log := log_of(three, run, 0)) and str(found.plan_id)[:12] in log)


def test_a_run_survives_an_outage_of_the_service_and_a_drained_agent(three: Cluster) -> None:
    steps, before = 60, three.names()
    run = submit(three, steps=steps, model={"pause": 0.1})  # still running after the outage
    three.until_step(run, 2)
    agents = busy(three)
    with three.service_away():
        until(lambda: "no answer from" in "".join(agent.log for agent in agents), three.story)
        seen = 2 + max(agent.step(run.id) for agent in agents)
        until(lambda: all(agent.step(run.id) > seen for agent in agents), three.story)
    three.until_step(run, seen)
    assert three.client.run(run.id).state == "running"
    assert three.names() == before

    drained = agents[0]
    drained.process.terminate()
    ended = three.client.wait_run(run.id, DEADLINE)
    assert (ended.state, ended.error) == ("succeeded", None), three.story()
    kinds = [event["kind"] for event in three.client.run_events(run.id)]
    assert [kind for kind in kinds if kind != "running"] == ["waiting", "starting", "succeeded"]
    found = [losses for agent in agents if (losses := read_losses(agent.results(run.id)))]
    assert [len(losses) for losses in found] == [steps]
    assert drained.process.wait(timeout=DEADLINE) == 0, drained.log
    assert three.names() == before - {drained.name}
    until(lambda: not busy(three), three.story)


def test_the_launcher_and_the_rank_of_a_killed_agent_die_with_it(three: Cluster) -> None:
    run = submit(three)
    until(lambda: any(len(agent.descendants()) == 2 for agent in busy(three)), three.story)
    agent = next(agent for agent in busy(three) if len(agent.descendants()) == 2)
    processes = agent.descendants()
    agent.process.kill()
    agent.process.wait(timeout=DEADLINE)
    until(lambda: not any(map(is_alive, processes)), three.story)
    logs = "".join(path.read_text() for path in (agent.folder / "state" / run.id).rglob("std*.log"))
    assert "has been silent" not in logs, "the rank ended only because its agent was silent"
    three.client.cancel_run(run.id)


def test_an_agent_runs_a_script_on_two_ranks_with_the_plan_of_the_run(three: Cluster) -> None:
    client, plan, path = three.client, a_plan(), TESTS / "support" / "run_train.py"
    client.import_plan(plan_json(plan))
    script = {"path": str(path), "arguments": ["--steps", "7"]}
    run = client.submit_run(plan.plan_id, script=script, nodes=1, options={"retries": 0})
    three.start("single", "--slots", "2", "--allow-script", str(path.parent / "run_*.py"), allow=None)
    ended = client.wait_run(run.id, DEADLINE)
    assert (ended.state, ended.error) == ("succeeded", None), three.story()
    # An agent that could not send its last files in time reports the end without them, and sends them later.
    until(lambda: all(log_of(three, run, rank) for rank in range(2)), three.story)
    logs = [log_of(three, run, rank) for rank in range(2)]
    assert "trained run_train.py 7 steps, loss tensor(" in logs[0]
    assert "trained run_train.py 7 steps, loss None" in logs[1]
    ranks = [rank for node in ended.document["members"] for rank in node["ranks"]]
    assert [rank["step"] for rank in ranks] == [6, 6]
    measured = {event["name"] for event in client.run_trace(run.id)["traceEvents"] if event["ph"] == "X"}
    assert measured.issuperset(action for actions in plan.orders.all_text() for action in actions)


@pytest.mark.parametrize(
    ("server", "message"), [("", "--server URL"), ("planner:8000", "must be an address such as http://")]
)
def test_a_wrong_address_is_reported(server: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["agent", "--server", server]) == 2
    assert message in capsys.readouterr().err
