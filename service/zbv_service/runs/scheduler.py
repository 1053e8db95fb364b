"""Which waiting run gets which agents: all that it needs at once, or none.

A pure decision; :mod:`zbv_service.database.runs` carries it out in one transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zbv_service.client_runs import is_allowed, is_directory_allowed, is_run_allowed


@dataclass(frozen=True)
class Wanted:
    """A waiting run: so many agents with so many slots each, which load a model and write checkpoints.

    Attributes
    ----------
    checkpoint_directory
        None when it saves nothing.
    refused_by
        Ids of agents that have refused this run; it is not given to them again.
    """

    run_id: str
    nodes: int
    ranks_per_node: int
    factory: str
    checkpoint_directory: str | None = None
    refused_by: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Offer:
    """A live agent.

    Attributes
    ----------
    owner
        The token that registered it.
    checkpoint_directories
        As :func:`zbv_service.client_runs.is_run_allowed` takes them; None of an agent that did not say.
    """

    agent_id: str
    slots: int
    is_idle: bool
    allowed_models: tuple[str, ...]
    owner: str | None = None
    checkpoint_directories: tuple[str, ...] | None = None


def choose(waiting: Sequence[Wanted], agents: Sequence[Offer]) -> dict[str, list[str]]:
    """Agents for the runs that can start now, by run; both sequences have the oldest first.

    An agent is suitable when it has enough slots, allows the model and the checkpoint directory, and has not
    refused the run. All agents of a run have one owner: the first of them says where the ranks meet, and
    ranks trust each other.
    A run for which there are enough agents, only some of them busy, keeps those that are idle from younger
    runs: else a large run would never start. A run for which there are not enough holds nothing.
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


def lack(run: Wanted, agents: Sequence[Offer]) -> str:
    """What a run waits for, and why the present agents do not suffice, as a sentence."""
    suitable = _suitable(run, agents)
    busy = sum(not agent.is_idle for agent in suitable)
    found = f"{len(suitable)} of {_count(len(agents), 'agent')} can take it"
    reasons = [f"{busy} of these busy"] if busy else []
    reasons += [
        f"{count} {reason}"
        for count, reason in (
            (sum(agent.slots < run.ranks_per_node for agent in agents), "with too few slots"),
            (
                sum(not is_allowed(run.factory, a.allowed_models) for a in agents),
                "not allowing the model",
            ),
            (
                sum(
                    not is_directory_allowed(run.checkpoint_directory, a.checkpoint_directories)
                    for a in agents
                ),
                "not allowing the checkpoint directory",
            ),
            (sum(agent.agent_id in run.refused_by for agent in agents), "having refused it"),
        )
        if count
    ]
    owners = len(_by_owner(suitable))
    if owners > 1:
        reasons.append(f"registered with {owners} tokens, of which one must have them all")
    each = " that allows" if run.nodes == 1 else " each that allow"
    directory = "" if run.checkpoint_directory is None else f" and checkpoints in {run.checkpoint_directory}"
    return (
        f"{_count(run.nodes, 'agent')} with {_count(run.ranks_per_node, 'slot')}{each} model "
        f"{run.factory}{directory}; {found}{', ' if reasons else ''}{', '.join(reasons)}"
    )


def _suitable(run: Wanted, agents: Sequence[Offer]) -> list[Offer]:
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
        )
    ]


def _by_owner(agents: Sequence[Offer]) -> list[list[Offer]]:
    """The agents of each owner; both the owners and their agents in the order in which they come."""
    groups: dict[str | None, list[Offer]] = {}
    for agent in agents:
        groups.setdefault(agent.owner, []).append(agent)
    return list(groups.values())


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
