"""A service and agents as processes: runs that wait, succeed, and fail."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from support.agents import DEADLINE, AgentProcess, Cluster, a_plan, cluster, read_losses, until
from support.paths import TESTS
from zbv_service.client import Run
from zbv_solver.plans.plan import plan_json
from zbv_worker.commands.cli import main

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A service without agents."""
    with cluster(tmp_path_factory.mktemp("cluster")) as found:
        yield found


@pytest.fixture(scope="module")
def pair(started: Cluster) -> Pair:
    """Two agents for several runs: no run may disturb the next one."""
    return Pair(started, *started.start_two())


@dataclass
class Pair:
    started: Cluster
    one: AgentProcess
    two: AgentProcess

    def submit(self, **options: Any) -> Run:
        until(lambda: all(agent["run_id"] is None for agent in self.started.client.agents()))
        return self.started.submit(**options)

    def until_gone(self) -> None:
        """Wait until no launcher and no rank is left on either node."""
        until(lambda: all_gone(self.one, self.two), self.started.story)


def all_gone(*agents: AgentProcess) -> bool:
    return not any(agent.descendants() for agent in agents)


def node_rank_of(run: Run, name: str) -> int:
    return next(int(node["node_rank"]) for node in run.document["members"] if node["agent"] == name)


def test_a_run_waits_while_no_agent_allows_its_model(started: Cluster) -> None:
    """The first test with the service, because other agents would take the run."""
    agents = [started.start("wary", allow=None), started.start("choosy", allow="another.*")]
    until(lambda: started.names() == {"wary", "choosy"}, started.story)
    run = started.submit()
    until(lambda: "2 not allowing the model" in (started.client.run(run.id).document["waits_for"] or ""))
    assert started.client.cancel_run(run.id).state == "cancelled"
    assert all_gone(*agents)
    made = [path for agent in agents for path in (agent.folder / "state").iterdir() if path.is_dir()]
    assert made == [], "an agent prepared a run that it may not load"
    for agent in agents:
        agent.process.terminate()
        assert agent.process.wait(timeout=DEADLINE) == 0, agent.log
    assert started.names() == set()


def test_a_rank_that_hangs_is_named_by_the_one_that_waits_for_it(pair: Pair) -> None:
    started = pair.started
    run = pair.submit(timeout=15)
    started.until_step(run, 2)
    os.kill(pair.two.rank(), signal.SIGSTOP)
    ended = started.client.wait_run(run.id, DEADLINE)
    assert ended.state == "failed", started.story()
    cause, hanging = ended.failures[0], node_rank_of(ended, "two")
    assert (cause["kind"], cause["agent"], cause["peer"]) == ("peer", "one", hanging), ended.failures
    assert cause["action"] in cause["detail"]
    assert cause["step"] >= 3
    pair.until_gone()


def test_a_run_survives_an_outage_of_the_service_and_a_drained_agent(pair: Pair) -> None:
    """The last test with these two agents, because they leave."""
    started, steps = pair.started, 60
    run = pair.submit(steps=steps, model={"pause": 0.1})  # still running after the outage
    started.until_step(run, 2)
    with started.service_away():
        until(lambda: "no answer from" in pair.one.log + pair.two.log, started.story)
        seen = 2 + max(agent.step(run.id) for agent in (pair.one, pair.two))
        until(lambda: all(agent.step(run.id) > seen for agent in (pair.one, pair.two)), started.story)
    started.until_step(run, seen)
    assert started.client.run(run.id).state == "running"
    assert started.names() == {"one", "two"}

    pair.two.process.terminate()
    ended = started.client.wait_run(run.id, DEADLINE)
    assert (ended.state, ended.error) == ("succeeded", None), started.story()
    kinds = [event["kind"] for event in started.client.run_events(run.id)]
    assert [kind for kind in kinds if kind != "running"] == ["waiting", "starting", "succeeded"]
    found = [losses for agent in (pair.one, pair.two) if (losses := read_losses(agent.results(run.id)))]
    assert [len(losses) for losses in found] == [steps]
    assert pair.two.process.wait(timeout=DEADLINE) == 0, pair.two.log
    assert started.names() == {"one"}
    pair.until_gone()

    pair.one.process.terminate()  # it is idle, so it ends at once
    assert pair.one.process.wait(timeout=DEADLINE) == 0, pair.one.log
    assert started.names() == set()


def test_an_agent_runs_a_script_on_two_ranks_with_the_plan_of_the_run(started: Cluster) -> None:
    client, plan, path = started.client, a_plan(), TESTS / "support" / "run_train.py"
    client.import_plan(plan_json(plan))
    script = {"path": str(path), "arguments": ["--steps", "7"]}
    run = client.submit_run(plan.plan_id, script=script, nodes=1, options={"retries": 0})
    started.start("single", "--slots", "2", "--allow-script", str(path.parent / "run_*.py"), allow=None)
    ended = client.wait_run(run.id, DEADLINE)
    assert (ended.state, ended.error) == ("succeeded", None), started.story()
    logs = [client.rank_log(run.id, rank) for rank in range(2)]
    assert "trained run_train.py 7 steps, loss tensor(" in logs[0]
    assert "trained run_train.py 7 steps, loss None" in logs[1]
    ranks = [rank for node in ended.document["members"] for rank in node["ranks"]]
    assert [rank["step"] for rank in ranks] == [6, 6]
    measured = {event["name"] for event in client.run_trace(run.id)["traceEvents"] if event["ph"] == "X"}
    assert measured.issuperset(action for actions in plan.orders.all_text() for action in actions)


@pytest.mark.parametrize(
    ("server", "message"), [("", "--server URL"), ("planner:8000", "must be an address such as http://")]
)
def test_a_wrong_address_is_reported_at_once(
    server: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["agent", "--server", server]) == 2
    assert message in capsys.readouterr().err
