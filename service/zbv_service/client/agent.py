"""The client of an agent: it offers a node, takes its part of runs, and sends what its ranks measured."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from zbv_service.client.answers import as_type, member, parse
from zbv_service.client.calls import as_nothing, below, decoded
from zbv_service.client.client import Client
from zbv_service.client.errors import AgentGone, InvalidRequest

T = TypeVar("T")
_COMPRESSION = 3
"""A low gzip level: it compresses nearly as well and leaves the processor to the ranks."""


@dataclass(frozen=True)
class Registration:
    """The interval between heartbeats, and the silence after which the service declares an agent lost."""

    heartbeat_seconds: float
    timeout_seconds: float


@dataclass(frozen=True)
class NodeWork:
    """The part of one node in one generation of a run; ``document`` is the whole answer.

    ``script`` is the path of the script that the ranks run; ``factory`` is that of the model otherwise.
    """

    run_id: str
    generation: int
    node_rank: int
    nodes: int
    ranks_per_node: int
    rendezvous: str
    plan_id: str
    factory: str | None
    document: dict[str, Any]
    script: str | None = None


@dataclass(frozen=True)
class HeartbeatReply:
    """The service's answer to a heartbeat."""

    stop: bool
    """Whether the agent must stop its ranks."""
    cause: str | None = None
    """Why: ``cancelled``, ``failed`` or ``unknown-run``; None unless ``stop``."""
    reason: str = ""
    """The same as a sentence."""
    plan_id: str | None = None
    """The plan to switch to; None keeps the current plan."""


class AgentClient(Client):
    """A blocking client that can also make the calls of an agent.

    Calls with an agent's id raise :class:`AgentGone` when the service no longer accepts the agent.
    """

    def register_agent(self, agent: Mapping[str, Any]) -> Registration:
        """Offer a node; ``agent`` is an AgentRequest of the API."""
        return self._call("POST", "/v1/agents", as_type(Registration), json=dict(agent))

    def next_work(self, agent_id: str, wait: float) -> NodeWork | None:
        """The agent's next work; None when there is none for ``wait`` seconds."""
        path = below("agents", agent_id, "work")
        return self._agent_call("GET", path, _work_or_none, params={"wait": wait})

    def heartbeat(self, agent_id: str, body: Mapping[str, Any]) -> HeartbeatReply:
        """Report that the agent is alive; ``body`` is a Heartbeat of the API."""
        path = below("agents", agent_id, "heartbeat")
        return self._agent_call("POST", path, as_type(HeartbeatReply), json=dict(body))

    def put_trace(self, agent_id: str, work: NodeWork, rank: int, text: bytes) -> None:
        """Send a rank's measurements, the JSON text that the rank wrote."""
        self._put(agent_id, work, rank, "trace", "application/json", text)

    def put_log(self, agent_id: str, work: NodeWork, rank: int, text: bytes) -> None:
        """Send the end of a rank's log."""
        self._put(agent_id, work, rank, "log", "text/plain", text)

    def put_events(self, agent_id: str, work: NodeWork, rank: int, text: bytes) -> None:
        """Send a rank's events, the JSON text that the rank wrote."""
        self._put(agent_id, work, rank, "events", "application/json", text)

    def _put(self, agent_id: str, work: NodeWork, rank: int, kind: str, media_type: str, text: bytes) -> None:
        of_run = ("runs", work.run_id, "generations", str(work.generation), "ranks", str(rank), kind)
        path = below("agents", agent_id, *of_run)
        headers = {"Content-Type": media_type, "Content-Encoding": "gzip"}
        self._agent_call("PUT", path, as_nothing, content=gzip.compress(text, _COMPRESSION), headers=headers)

    def report_end(self, agent_id: str, body: Mapping[str, Any]) -> None:
        """Report how the node's part of a run ended. Reporting it twice changes nothing."""
        self._agent_call("POST", below("agents", agent_id, "ended"), as_nothing, json=dict(body))

    def drain_agent(self, agent_id: str) -> None:
        """Accept no more work."""
        self._agent_call("POST", below("agents", agent_id, "drain"), as_nothing)

    def remove_agent(self, agent_id: str) -> None:
        """Deregister."""
        self._agent_call("DELETE", below("agents", agent_id), as_nothing)

    def _agent_call(self, method: str, path: str, read: Callable[[httpx.Response], T], **more: Any) -> T:
        try:
            return self._call(method, path, read, **more)
        except InvalidRequest as error:
            # Another token owns the agent if its own token was replaced after it had registered.
            if error.status in (404, 410) or error.kind.endswith("/errors/agent-of-others"):
                raise AgentGone(error.document) from None
            raise


def _work_or_none(response: httpx.Response) -> NodeWork | None:
    if response.status_code == 204:
        return None
    answer = parse(dict[str, Any], decoded(response))
    of_script = answer.get("script")  # older services do not send it
    script = None if of_script is None else member(of_script, "path")
    factory = None if script is not None else member(member(answer, "model"), "factory")
    return parse(NodeWork, {**answer, "factory": factory, "script": script, "document": answer})
