"""Owners of agents: only the token that registered an agent, or one with the scope admin, may act for it."""

from __future__ import annotations

from collections import OrderedDict

from zbv_service.database import AgentTable
from zbv_service.errors import AGENT_OF_OTHERS, ProblemError
from zbv_service.security.grants import Grant

REMEMBERED = 16_384


class AgentOwners:
    """Checks owners of agents. An owner changes only if an agent that is gone registers again with its id, so
    recent ones are cached."""

    def __init__(self, agents: AgentTable):
        self._agents = agents
        self._known: OrderedDict[str, str] = OrderedDict()

    async def require(self, grant: Grant, agent_id: str) -> None:
        """Require that a caller may act for an agent; anyone may act for an unknown agent.

        An agent that was registered before owners were stored gets as its owner the first token that
        acts for it, other than one with the scope admin.

        Raises
        ------
        ProblemError
            403: the caller may not.
        """
        if "admin" in grant.scopes:
            return
        owner = self._known.get(agent_id)
        if owner is None:
            owner = await self._agents.owned(agent_id, grant.owner)
            if owner is None:
                return
            self._remember(agent_id, owner)
        if owner != grant.owner:
            raise ProblemError(
                AGENT_OF_OTHERS,
                f"agent {agent_id} was registered with another token; only that token, or one with the scope "
                f"admin, may act for it. Register this node under a new id.",
            )

    def forget(self, agent_id: str) -> None:
        """Forget the cached owner of an agent that has registered again."""
        self._known.pop(agent_id, None)

    def _remember(self, agent_id: str, owner: str) -> None:
        self._known[agent_id] = owner
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
