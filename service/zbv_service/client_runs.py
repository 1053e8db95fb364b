"""The thin client's calls for agents and runs; as :mod:`zbv_service.client`, it needs httpx and no more."""

from __future__ import annotations

import gzip
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any

import httpx

from zbv_service.client import Client, InvalidRequest
from zbv_service.client.answers import member, read_object
from zbv_service.client.calls import Call, as_json, below, decoded

_POLL_SECONDS = 0.2
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


@dataclass(frozen=True)
class Run:
    """A run as the service describes it; ``document`` is all of that. Its plan may still be searched."""

    id: str
    state: str
    plan_id: str | None
    error: dict[str, Any] | None
    document: dict[str, Any]

    @property
    def is_finished(self) -> bool:
        """Whether its state is final."""
        return self.state in ("succeeded", "failed", "cancelled")

    @property
    def failures(self) -> list[dict[str, Any]]:
        """Causes before consequences: ``agent``, ``rank``, ``action``, ``peer`` and ``detail`` of each."""
        return list((self.error or {}).get("failures") or [])


class AgentGone(InvalidRequest):
    """The service does not know the agent, has declared it lost, or says that it belongs to another token.

    The agent's part of a run is over; register again under a new id.
    """


class RunTimeout(Exception):
    """A run did not end in the caller's time; it goes on."""


class RunClient(Client):
    """A :class:`Client` that also runs plans, and works as an agent."""

    def submit_run(
        self,
        plan_id: str | None,
        model: Mapping[str, Any],
        *,
        nodes: int,
        steps: int,
        options: Mapping[str, Any] | None = None,
        problem: Any = None,
        search_options: Mapping[str, Any] | None = None,
        key: str | None = None,
    ) -> Run:
        """Have a plan run, once, however often the request is repeated.

        Parameters
        ----------
        plan_id, problem
            One of them: a plan, or a problem document whose plan is searched first.
        model
            ``factory``, and perhaps ``arguments`` and ``seed``.
        key
            The request's Idempotency-Key, for callers that repeat the request themselves; a random one unless
            given. The client repeats a request whose answer was lost with the same key.

        Raises
        ------
        InvalidRequest
            When there is no such plan, or something breaks a rule.
        """
        what = {"plan_id": plan_id} if problem is None else {"plan_id": plan_id, "problem": problem}
        body = {
            **what,
            "search_options": None if search_options is None else dict(search_options),
            "model": dict(model),
            "nodes": nodes,
            "steps": steps,
            "options": dict(options or {}),
        }
        headers = {"Idempotency-Key": key or uuid.uuid4().hex}
        return self._call(Call("POST", "/v1/runs", _RUN, json=body, headers=headers))

    def run(self, run_id: str) -> Run:
        """The state of a run."""
        return self._call(Call("GET", below("runs", run_id), _RUN))

    def runs(self, limit: int = 100) -> list[Run]:
        """The newest runs first."""
        read = as_json(lambda answer: [_run(entry) for entry in member(answer, "runs")])
        return self._call(Call("GET", "/v1/runs", read, params={"limit": limit}))

    def run_events(self, run_id: str, after: int = 0) -> list[dict[str, Any]]:
        """What happened to a run after an event."""
        read = as_json(lambda answer: list(member(answer, "events")))
        return self._call(Call("GET", below("runs", run_id, "events"), read, params={"after": after}))

    def cancel_run(self, run_id: str) -> Run:
        """Stop a run on all of its nodes."""
        return self._call(Call("POST", below("runs", run_id, "cancel"), _RUN))

    def change_plan(self, run_id: str, plan_id: str) -> Run:
        """Have a run change over to another plan of its shape; raises :class:`InvalidRequest`."""
        return self._call(Call("POST", below("runs", run_id, "plan"), _RUN, json={"plan_id": plan_id}))

    def run_trace(self, run_id: str, generation: int | None = None) -> dict[str, Any]:
        """The newest common step of all ranks, in the Trace Event Format; raises :class:`NotFound`."""
        wanted = {"generation": generation}
        return self._call(Call("GET", below("runs", run_id, "trace"), as_json(read_object), params=wanted))

    def rank_log(self, run_id: str, rank: int, generation: int | None = None) -> str:
        """The end of a rank's log; raises :class:`NotFound`."""
        path, wanted = below("runs", run_id, "ranks", str(rank), "log"), {"generation": generation}
        return self._call(Call("GET", path, lambda response: response.text, params=wanted))

    def wait_run(self, run_id: str, timeout: float) -> Run:
        """Wait for a run to end; raises :class:`RunTimeout` when it does not within ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while not (found := self.run(run_id)).is_finished:
            if time.monotonic() > deadline:
                raise RunTimeout(f"run {run_id} is still {found.state} after {timeout:g} s; it goes on.")
            time.sleep(_POLL_SECONDS)
        return found

    def agents(self) -> list[dict[str, Any]]:
        """The agents that are there."""
        read = as_json(lambda answer: list(member(answer, "agents")))
        return self._call(Call("GET", "/v1/agents", read))

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


def _run(answer: Any) -> Run:
    fields = {name: member(answer, name) for name in ("id", "state", "plan_id", "error")}
    return Run(**fields, document=dict(answer))


_RUN = as_json(_run)


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
