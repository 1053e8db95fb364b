"""The scheduler: decides which waiting run gets which agents, all that it needs at once or none.

The decision is pure; :meth:`zbv_service.database.RunTable.assign` carries it out in one transaction.
"""

from __future__ import annotations

from collections.abc import Sequence

from zbv_service.client.admission import is_directory_allowed, is_model_allowed, is_script_allowed
from zbv_service.records.runs import AvailableAgent, Decision, WaitingRun


def decide(waiting: Sequence[WaitingRun], agents: Sequence[AvailableAgent]) -> Decision:
    """Choose agents for the runs that can start now; both sequences have the oldest first.

    An agent is suitable if it has enough slots, allows the model or the script, allows the checkpoint
    directory, and has not refused the run. All agents of a run have the same owner, because its ranks meet at
    the address of the first agent and trust each other.

    If there are enough suitable agents for a run but some of them are busy, the run reserves the idle ones;
    otherwise younger runs could delay a large run forever. A run without enough suitable agents reserves
    none.
    """
    offers = _Offers(agents)
    idle = {agent.agent_id for agent in agents if agent.is_idle}
    placed: dict[str, list[str]] = {}
    for run in waiting:
        pools = [pool for pool in _by_owner(offers.suitable(run)) if len(pool) >= run.nodes]
        free = [[agent.agent_id for agent in pool if agent.agent_id in idle] for pool in pools]
        if not free:
            continue
        enough = next((pool for pool in free if len(pool) >= run.nodes), None)
        if enough is not None:
            placed[run.run_id] = enough[: run.nodes]
        idle.difference_update(placed.get(run.run_id, max(free, key=len)))
    return Decision(placed, {run.run_id: offers.lack(run) for run in waiting if run.run_id not in placed})


class _Offers:
    """The live agents of a pass. What several agents allow alike is compared once with each program."""

    def __init__(self, agents: Sequence[AvailableAgent]):
        self._agents = agents
        number: dict[tuple[object, ...], int] = {}
        self._rules: list[AvailableAgent] = []
        self._rule_of = []
        for agent in agents:
            rule = (agent.allowed_models, agent.allowed_scripts, agent.checkpoint_directories)
            if rule not in number:
                self._rules.append(agent)
            self._rule_of.append(number.setdefault(rule, len(number)))
        self._programs: dict[tuple[str | None, str | None], list[bool]] = {}
        self._directories: dict[str | None, list[bool]] = {}

    def suitable(self, run: WaitingRun) -> list[AvailableAgent]:
        """The agents that can take a run, busy ones included."""
        programs, directories = self._allowed(run)
        return [
            agent
            for agent, rule in zip(self._agents, self._rule_of, strict=True)
            if agent.slots >= run.ranks_per_node
            and programs[rule]
            and directories[rule]
            and agent.agent_id not in run.refused_by
        ]

    def lack(self, run: WaitingRun) -> str:
        """What a run needs, and why the agents are not enough."""
        suitable, directory, agents = self.suitable(run), run.checkpoint_directory, self._agents
        programs, directories = self._allowed(run)
        kind = "model" if run.script is None else "script"
        found = f"{len(suitable)} of {_count(len(agents), 'agent')} can take it"
        obstacles = {
            "of these busy": sum(not agent.is_idle for agent in suitable),
            "with too few slots": sum(agent.slots < run.ranks_per_node for agent in agents),
            f"not allowing the {kind}": sum(not programs[rule] for rule in self._rule_of),
            "not allowing the checkpoint directory": sum(not directories[rule] for rule in self._rule_of),
            "having refused it": sum(agent.agent_id in run.refused_by for agent in agents),
        }
        reasons = [f"{blocked} {reason}" for reason, blocked in obstacles.items() if blocked]
        owners = len(_by_owner(suitable))
        if owners > 1:
            reasons.append(f"registered with {owners} tokens, of which one must have them all")
        each = " that allows" if run.nodes == 1 else " each that allow"
        checkpoints = "" if directory is None else f" and checkpoints in {directory}"
        return (
            f"{_count(run.nodes, 'agent')} with {_count(run.ranks_per_node, 'slot')}{each} {kind} "
            f"{run.script or run.factory}{checkpoints}; {found}{', ' if reasons else ''}{', '.join(reasons)}"
        )

    def _allowed(self, run: WaitingRun) -> tuple[list[bool], list[bool]]:
        """Whether the agents of every rule allow a run's program, and its checkpoint directory."""
        program, directory = (run.factory, run.script), run.checkpoint_directory
        if program not in self._programs:
            self._programs[program] = [_allows_program(run, agent) for agent in self._rules]
        if directory not in self._directories:
            self._directories[directory] = [
                is_directory_allowed(directory, agent.checkpoint_directories) for agent in self._rules
            ]
        return self._programs[program], self._directories[directory]


def _allows_program(run: WaitingRun, agent: AvailableAgent) -> bool:
    if run.script is not None:
        return is_script_allowed(run.script, agent.allowed_scripts)
    return run.factory is not None and is_model_allowed(run.factory, agent.allowed_models)


def _by_owner(agents: Sequence[AvailableAgent]) -> list[list[AvailableAgent]]:
    """Group agents by owner, keeping the order of owners and agents."""
    groups: dict[str | None, list[AvailableAgent]] = {}
    for agent in agents:
        groups.setdefault(agent.owner, []).append(agent)
    return list(groups.values())


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
