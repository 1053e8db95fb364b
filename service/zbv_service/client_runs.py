"""The thin client's calls for agents and runs; as :mod:`zbv_service.client`, it needs httpx and no more."""

from __future__ import annotations

import gzip
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any

import httpx

from zbv_service.client import AgentGone, Client, InvalidRequest, Run, RunTimeout  # noqa: F401
from zbv_service.client.answers import member, read_object
from zbv_service.client.calls import Call, as_json, below, decoded

_COMPRESSION = 3
"""Most of what gzip can do, at a fraction of its time: the ranks use the cores too."""


def is_run_allowed(
    factory: str,
    checkpoint_directory: str | None,
    *,
    models: Sequence[str],
    checkpoint_directories: Sequence[str] | None,
) -> bool:
    """Whether an agent takes a run: the one rule for the service, which chooses agents, and for agents.

    Parameters
    ----------
    factory, checkpoint_directory
        Of the run; without checkpoints there is no directory.
    models, checkpoint_directories
        What the agent allows: see :func:`is_allowed` and :func:`is_directory_allowed`.
    """
    return is_allowed(factory, models) and is_directory_allowed(checkpoint_directory, checkpoint_directories)


def is_directory_allowed(directory: str | None, allowed: Sequence[str] | None) -> bool:
    """Whether an absolute path is one of an agent's directories or lies below one.

    None of ``allowed`` restricts nothing. Only the text counts: links must be resolved before. A path with
    ``..`` is in no directory.
    """
    if directory is None or allowed is None:
        return True
    wanted = PurePosixPath(directory)
    return ".." not in wanted.parts and any(wanted.is_relative_to(each) for each in allowed)


def is_allowed(factory: str, patterns: Sequence[str]) -> bool:
    """Whether ``package.module:factory`` matches one of an agent's patterns.

    ``*`` stands for anything, dots included. A pattern with a colon is compared with the whole name, one
    without with the module alone. ``package.*`` also admits ``package`` itself.
    """
    module = factory.partition(":")[0]
    return any(
        fnmatchcase(factory if ":" in pattern else module, pattern)
        or (pattern.endswith(".*") and fnmatchcase(module, pattern[:-2]))
        for pattern in patterns
    )


@dataclass(frozen=True)
class Registration:
    """What an agent must keep to: seconds between signs of life, and after which it is lost."""

    heartbeat_seconds: float
    timeout_seconds: float


@dataclass(frozen=True)
class NodeWork:
    """One node of one generation of a run; ``document`` is all that the service said."""

    run_id: str
    generation: int
    node_rank: int
    nodes: int
    ranks_per_node: int
    rendezvous: str
    plan_id: str
    factory: str
    document: dict[str, Any]


@dataclass(frozen=True)
class Orders:
    """What an agent is told with every sign of life.

    Attributes
    ----------
    cause
        Why to stop: ``cancelled``, ``failed`` or ``unknown-run``; None otherwise.
    plan_id
        The plan to change over to, None when there is none.
    """

    stop: bool
    cause: str | None = None
    reason: str = ""
    plan_id: str | None = None


class RunClient(Client):
    """A :class:`Client` that also makes the calls of an agent."""

    def register_agent(self, agent: Mapping[str, Any]) -> Registration:
        """Offer a node; ``agent`` is as the API documents AgentRequest."""
        answer = self._call(Call("POST", "/v1/agents", as_json(read_object), json=dict(agent)))
        return Registration(
            float(member(answer, "heartbeat_seconds")), float(member(answer, "timeout_seconds"))
        )

    def next_work(self, agent_id: str, wait: float) -> NodeWork | None:
        """Work for an agent, or None when there was none for ``wait`` seconds; raises :class:`AgentGone`."""
        answer = self._of_agent("GET", below("agents", agent_id, "work"), params={"wait": wait})
        return None if answer is None else _work(answer)

    def heartbeat(self, agent_id: str, body: Mapping[str, Any]) -> Orders:
        """Give a sign of life, and hear what to do. Raises :class:`AgentGone`."""
        answer = self._of_agent("POST", below("agents", agent_id, "heartbeat"), json=dict(body))
        cause, plan_id = member(answer, "cause"), member(answer, "plan_id")
        return Orders(bool(member(answer, "stop")), cause, str(member(answer, "reason")), plan_id)

    def put_trace(self, agent_id: str, work: NodeWork, rank: int, text: bytes) -> None:
        """Send what a rank measured, as the JSON text that it wrote. Raises :class:`AgentGone`."""
        self._put_part(agent_id, work, rank, "trace", "application/json", text)

    def put_log(self, agent_id: str, work: NodeWork, rank: int, text: bytes) -> None:
        """Send the end of a rank's log. Raises :class:`AgentGone`."""
        self._put_part(agent_id, work, rank, "log", "text/plain", text)

    def put_events(self, agent_id: str, work: NodeWork, rank: int, text: bytes) -> None:
        """Send what happened on a rank, as the JSON text that it wrote. Raises :class:`AgentGone`."""
        self._put_part(agent_id, work, rank, "events", "application/json", text)

    def _put_part(
        self, agent_id: str, work: NodeWork, rank: int, kind: str, media_type: str, text: bytes
    ) -> None:
        of_run = ("runs", work.run_id, "generations", str(work.generation), "ranks", str(rank), kind)
        path = below("agents", agent_id, *of_run)
        headers = {"Content-Type": media_type, "Content-Encoding": "gzip"}
        self._of_agent("PUT", path, content=gzip.compress(text, _COMPRESSION), headers=headers)

    def report_end(self, agent_id: str, body: Mapping[str, Any]) -> None:
        """Say how a node ended; saying it twice changes nothing. Raises :class:`AgentGone`."""
        self._of_agent("POST", below("agents", agent_id, "ended"), json=dict(body))

    def drain_agent(self, agent_id: str) -> None:
        """Take no more work. Raises :class:`AgentGone`."""
        self._of_agent("POST", below("agents", agent_id, "drain"))

    def remove_agent(self, agent_id: str) -> None:
        """Deregister. Raises :class:`AgentGone`."""
        self._of_agent("DELETE", below("agents", agent_id))

    def _of_agent(self, method: str, path: str, **arguments: Any) -> Any:
        """The decoded answer, None where there is none."""
        try:
            return self._call(Call(method, path, _answer_or_none, errors=_GONE, **arguments))
        except InvalidRequest as error:
            if error.document.get("type") == _OF_OTHERS:  # the token was replaced since it registered
                raise AgentGone(error.document) from None
            raise


_GONE = {404: AgentGone, 410: AgentGone}
_OF_OTHERS = "/problems/agent-of-others"


def _answer_or_none(response: httpx.Response) -> Any:
    return None if response.status_code == 204 else decoded(response)


def _work(answer: Any) -> NodeWork:
    return NodeWork(
        run_id=str(member(answer, "run_id")),
        generation=int(member(answer, "generation")),
        node_rank=int(member(answer, "node_rank")),
        nodes=int(member(answer, "nodes")),
        ranks_per_node=int(member(answer, "ranks_per_node")),
        rendezvous=str(member(answer, "rendezvous")),
        plan_id=str(member(answer, "plan_id")),
        factory=str(member(member(answer, "model"), "factory")),
        document=dict(answer),
    )
