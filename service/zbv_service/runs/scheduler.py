"""The scheduler: decides which waiting run gets which agents, all that it needs at once or none.

The decision is pure; :meth:`zbv_service.database.RunTable.assign` carries it out in one transaction.
"""

from __future__ import annotations

from collections.abc import Sequence

from zbv_service.client.admission import (
    is_directory_allowed,
    is_model_allowed,
    is_run_allowed,
    is_script_allowed,
)
from zbv_service.records.runs import AvailableAgent, WaitingRun


def choose(waiting: Sequence[WaitingRun], agents: Sequence[AvailableAgent]) -> dict[str, list[str]]:
    """Choose agents for the runs that can start now, by run id; both sequences have the oldest first.

    An agent is suitable if it has enough slots, allows the model or the script, allows the checkpoint
    directory, and has not refused the run. All agents of a run have the same owner, because its ranks meet at
    the address of the first agent and trust each other.

    If there are enough suitable agents for a run but some of them are busy, the run reserves the idle ones;
    otherwise younger runs could delay a large run forever. A run without enough suitable agents reserves
    none.
    """
    idle = {agent.agent_id for agent in agents if agent.is_idle}
    placed: dict[str, list[str]] = {}
    for run in waiting:
        pools = [pool for pool in _by_owner(_suitable(run, agents)) if len(pool) >= run.nodes]
        free = [[agent.agent_id for agent in pool if agent.agent_id in idle] for pool in pools]
        if not free:
            continue
        enough = next((pool for pool in free if len(pool) >= run.nodes), None)
        if enough is not None:
            placed[run.run_id] = enough[: run.nodes]
        idle.difference_update(placed.get(run.run_id, max(free, key=len)))
    return placed


def lack(run: WaitingRun, agents: Sequence[AvailableAgent]) -> str:
    """A sentence that says what a waiting run needs, and why the present agents are not enough."""
    suitable, directory = _suitable(run, agents), run.checkpoint_directory
    kind = "model" if run.script is None else "script"
    found = f"{len(suitable)} of {_count(len(agents), 'agent')} can take it"
    obstacles = {
        "of these busy": [not agent.is_idle for agent in suitable],
        "with too few slots": [agent.slots < run.ranks_per_node for agent in agents],
        f"not allowing the {kind}": [not _allows_program(run, agent) for agent in agents],
        "not allowing the checkpoint directory": [
            not is_directory_allowed(directory, agent.checkpoint_directories) for agent in agents
        ],
        "having refused it": [agent.agent_id in run.refused_by for agent in agents],
    }
    reasons = [f"{sum(blocked)} {reason}" for reason, blocked in obstacles.items() if any(blocked)]
    owners = len(_by_owner(suitable))
    if owners > 1:
        reasons.append(f"registered with {owners} tokens, of which one must have them all")
    each = " that allows" if run.nodes == 1 else " each that allow"
    checkpoints = "" if directory is None else f" and checkpoints in {directory}"
    return (
        f"{_count(run.nodes, 'agent')} with {_count(run.ranks_per_node, 'slot')}{each} {kind} "
        f"{run.script or run.factory}{checkpoints}; {found}{', ' if reasons else ''}{', '.join(reasons)}"
    )


def _suitable(run: WaitingRun, agents: Sequence[AvailableAgent]) -> list[AvailableAgent]:
    return [
        agent
        for agent in agents
        if agent.slots >= run.ranks_per_node
        and agent.agent_id not in run.refused_by
        and is_run_allowed(
            run.factory,
            run.checkpoint_directory,
            models=agent.allowed_models,
            checkpoint_directories=agent.checkpoint_directories,
            script=run.script,
            scripts=agent.allowed_scripts,
        )
    ]


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
