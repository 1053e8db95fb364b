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
    """A live agent; ``owner`` is the token that registered it."""

    agent_id: str
    slots: int
    is_idle: bool
    allowed_models: tuple[str, ...]
    owner: str | None = None


def choose(waiting: Sequence[Wanted], agents: Sequence[Offer]) -> dict[str, list[str]]:
    """Agents for the runs that can start now, by run; both sequences have the oldest first.

    All agents of a run have one owner: the first of them says where the ranks meet, and ranks trust each
    other.
    A run for which there are enough agents, only some of them busy, keeps those that are idle from younger
    runs: else a large run would never start. A run for which there are not enough holds nothing.
    """
    idle = {agent.agent_id for agent in agents if agent.is_idle}
    placed: dict[str, list[str]] = {}
    for run in waiting:
        free = [[agent_id for agent_id in pool if agent_id in idle] for pool in _pools(run, agents)]
        if not free:
            continue
        enough = next((pool for pool in free if len(pool) >= run.nodes), None)
        if enough is not None:
            placed[run.run_id] = enough[: run.nodes]
        idle.difference_update(placed.get(run.run_id, max(free, key=len)))
    return placed


def _pools(run: Wanted, agents: Sequence[Offer]) -> list[list[str]]:
    """The agents that a run can be given: of every owner that has enough, those that may load the model.

    Where no owner has enough of these, all agents that are large enough: they refuse the run with a message
    that says what to do; waiting would say nothing.
    """
    large = [agent for agent in agents if agent.slots >= run.ranks_per_node]
    willing = [agent for agent in large if is_allowed(run.factory, agent.allowed_models)]
    return _by_owner(willing, run.nodes) or _by_owner(large, run.nodes)


def _by_owner(agents: Sequence[Offer], nodes: int) -> list[list[str]]:
    """The agents of each owner that has at least so many."""
    groups: dict[str | None, list[str]] = {}
    for agent in agents:
        groups.setdefault(agent.owner, []).append(agent.agent_id)
    return [ids for ids in groups.values() if len(ids) >= nodes]
