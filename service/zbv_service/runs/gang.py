"""Which waiting run gets which agents: all that it needs at once, or none.

A pure decision; :mod:`zbv_service.database.runs` carries it out in one transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zbv_service.client_runs import is_allowed


@dataclass(frozen=True)
class Wanted:
    """A waiting run: so many agents with so many slots each, to load this model."""

    run_id: str
    nodes: int
    ranks_per_node: int
    factory: str


@dataclass(frozen=True)
class Offer:
    """A live agent."""

    agent_id: str
    slots: int
    is_idle: bool
    allowed_models: tuple[str, ...]


def choose(waiting: Sequence[Wanted], agents: Sequence[Offer]) -> dict[str, list[str]]:
    """Agents for the runs that can start now, by run; both sequences have the oldest first.

    A run for which there are agents enough, only some of them busy, keeps those that are idle from younger
    runs: else a large run would never start. A run for which there are not enough holds nothing.
    """
    idle = {agent.agent_id for agent in agents if agent.is_idle}
    placed: dict[str, list[str]] = {}
    for run in waiting:
        suitable = _suitable(run, agents)
        if len(suitable) < run.nodes:
            continue
        free = [agent_id for agent_id in suitable if agent_id in idle]
        if len(free) >= run.nodes:
            placed[run.run_id] = free[: run.nodes]
        idle.difference_update(placed.get(run.run_id, free))
    return placed


def _suitable(run: Wanted, agents: Sequence[Offer]) -> list[str]:
    """Agents that may load the model, when they are enough; else all that are large enough.

    These refuse it with a message that says what to do; waiting would say nothing.
    """
    large = [agent for agent in agents if agent.slots >= run.ranks_per_node]
    willing = [agent for agent in large if is_allowed(run.factory, agent.allowed_models)]
    return [agent.agent_id for agent in (willing if len(willing) >= run.nodes else large)]
