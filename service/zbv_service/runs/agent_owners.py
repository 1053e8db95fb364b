"""Whose an agent is: only the token that registered it, or one with the scope admin, may act for it."""

from __future__ import annotations

from collections import OrderedDict

from zbv_service.database import AgentTable
from zbv_service.errors import AGENT_OF_OTHERS, ProblemError
from zbv_service.security.grants import Grant

REMEMBERED = 16_384


class AgentOwners:
    """The owners of agents. An owner changes only when an agent that is gone registers again under its id, so
    those seen last are remembered."""

    def __init__(self, agents: AgentTable):
        self._agents = agents
        self._known: OrderedDict[str, str] = OrderedDict()

    async def require(self, grant: Grant, agent_id: str) -> None:
        """Let those pass who may act for an agent; an unknown agent is everybody's.

        An agent that was registered before owners were stored becomes the property of the first token that
        acts for it, other than one with the scope admin.

        Raises
        ------
        ProblemError
            403 for anybody else.
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
        """Look an agent's owner up again: it has registered."""
        self._known.pop(agent_id, None)

    def _remember(self, agent_id: str, owner: str) -> None:
        self._known[agent_id] = owner
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
