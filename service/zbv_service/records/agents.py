"""Agents: what they send, what the database stores of them, and what the API answers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Literal, Self, get_args

from pydantic import BaseModel, Field, model_validator

from zbv_service.records.run_options import ModelDocument, RunOptionsDocument, ScriptDocument
from zbv_service.records.runs import FailureKind, NodeOutcome
from zbv_service.records.shared import NEXT, Record, RequestDocument

AgentState = Literal["live", "draining", "left", "lost"]
AGENT_STATES: tuple[str, ...] = get_args(AgentState)
AGENT_PRESENT: frozenset[str] = frozenset({"live", "draining"})
"""States of agents that can work."""
AGENT_ENDED: frozenset[str] = frozenset({"left", "lost"})
"""States that an agent leaves only by registering again."""

StopCause = Literal["cancelled", "failed", "unknown-run"]
"""Why an agent must end its ranks."""

Line = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")]
Directory = Annotated[str, Field(max_length=4000, pattern=r"^/[^\x00-\x1f\x7f]*$")]
Text = Annotated[str, Field(max_length=4000, pattern=r"^[^\x00]*$")]
Identifier = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Count = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]
Port = Annotated[int, Field(strict=True, ge=1, le=65535)]
_MAX_SLOTS = 256
"""Most ranks of one node. A heartbeat names every rank of its node, and is read in the event loop."""
MAX_RANK_EVENTS = 100
MAX_ALLOWED, MAX_DESCRIBED = 8 * 1024, 32 * 1024
"""Most characters of what a node allows, which every look for agents reads, and of devices and versions."""


class AllowsDocument(RequestDocument):
    """The runs that a node accepts. Runs with other models, scripts or directories wait for other agents."""

    models: Annotated[list[Line], Field(max_length=100)] = Field(
        [], description="Patterns such as mypackage.models.*; without any, the node loads no model."
    )
    scripts: Annotated[list[Line], Field(max_length=100)] = Field(
        [], description="Patterns of paths such as /shared/*; without any, the node runs no script."
    )
    checkpoint_directories: Annotated[list[Directory], Field(max_length=100)] | None = Field(
        None, description="Ranks may save checkpoints in or below these; null if the node does not say."
    )


class AgentRequest(RequestDocument):
    """A node that registers to run ranks."""

    id: Identifier = Field(description="Chosen at random by the agent; it may register again with it.")
    name: Line = Field(description="Name of the host for display.")
    address: Line = Field(description="Host name or IP address at which the other nodes reach this one.")
    port: Port = Field(description="A free port, where the ranks of a run meet if this is its first node.")
    slots: Annotated[int, Field(strict=True, ge=1, le=_MAX_SLOTS)] = Field(
        description="Number of ranks that it runs at the same time."
    )
    devices: Annotated[list[Line], Field(max_length=_MAX_SLOTS)] = Field([])
    versions: Annotated[dict[Line, Line], Field(max_length=50)] = Field({})
    allows: AllowsDocument = Field(default_factory=AllowsDocument)

    @model_validator(mode="after")
    def _is_short(self) -> Self:
        allows = self.allows
        allowed = (allows.models, allows.scripts, allows.checkpoint_directories or [])
        for texts, most, what in (
            ([*itertools.chain(*allowed)], MAX_ALLOWED, "patterns and directories"),
            (
                [*self.devices, *itertools.chain(*self.versions.items())],
                MAX_DESCRIBED,
                "devices and versions",
            ),
        ):
            found = sum(map(len, texts))
            if found > most:
                raise ValueError(f"{what} have {found} characters; they must have at most {most}")
        return self


class AgentDocument(Record):
    """A registered agent."""

    id: str
    name: str
    address: str
    port: int
    slots: int
    devices: list[str]
    versions: dict[str, str]
    allowed_models: list[str]
    allowed_scripts: list[str] = Field([])
    """Patterns of paths of scripts that it may run."""
    checkpoint_directories: list[str] | None
    """Where its ranks may save checkpoints; null if the agent did not say."""
    owner: str = Field(exclude=True)
    """The token that registered it (:attr:`zbv_service.security.tokens.Grant.owner`)."""
    state: AgentState
    run_id: str | None
    """The run that it works for."""
    created_at: datetime
    seen_at: datetime
    """The time of its last heartbeat."""


class RegisteredAgent(BaseModel):
    """A registered agent, and the timing of its heartbeats."""

    agent: AgentDocument
    heartbeat_seconds: float = Field(description="Seconds between heartbeats.")
    timeout_seconds: float = Field(
        description="An agent that is silent for longer is lost, and its run fails."
    )


class AgentList(BaseModel):
    """A page of agents, newest first."""

    agents: list[AgentDocument]
    next: str | None = NEXT


class WorkDocument(Record):
    """One node of one generation of a run."""

    run_id: str
    generation: int
    node_rank: int
    nodes: int
    ranks_per_node: int
    rendezvous: str = Field(description="host:port of the first node.")
    plan_id: str = Field(description="SHA-256 of the plan; ranks with different ones refuse to start.")
    model: ModelDocument | None = Field(description="null if the ranks run a script.")
    script: ScriptDocument | None = None
    steps: int | None = Field(description="null if the ranks run a script.")
    options: RunOptionsDocument


class RankPlace(RequestDocument):
    """The place of a rank: its current step and action, null before the first."""

    rank: Count
    step: Count | None = None
    action: Annotated[str, Field(max_length=32, pattern=r"^[0-9]+[FIWB][0-9]+$")] | None = None


class Heartbeat(RequestDocument):
    """A heartbeat of an agent."""

    port: Port | None = Field(None, description="A port that is currently free.")
    run_id: Identifier | None = Field(None, description="The run that the agent works on.")
    ranks: Annotated[list[RankPlace], Field(max_length=_MAX_SLOTS)] = Field([])

    def is_running(self, *, is_script: bool) -> bool:
        """Whether all of its ranks have begun a step, or a script, which need not have steps."""
        return bool(self.ranks) and (is_script or all(place.step is not None for place in self.ranks))


class HeartbeatAnswer(BaseModel):
    """What an agent must do about its run."""

    stop: bool = Field(description="Whether to stop its ranks.")
    cause: StopCause | None = Field(
        None, description="Why to stop; after a failure, ranks get a moment to report."
    )
    reason: str = Field("", description="The cause, as text.")
    plan_id: str | None = Field(
        None, description="The plan to change to; the agent of node 0 passes it to its ranks."
    )


class RankFailure(RequestDocument):
    """Why a rank ended, or why no rank was started (``rank`` is null then)."""

    rank: Count | None = None
    step: Count | None = None
    action: Annotated[str, Field(max_length=32)] | None = None
    peer: Count | None = Field(None, description="The rank that this rank waited for.")
    kind: FailureKind
    detail: Text = ""


class NodeEnd(RequestDocument):
    """The end of a node's part of a generation."""

    run_id: Identifier
    generation: Count
    outcome: NodeOutcome
    failures: Annotated[list[RankFailure], Field(max_length=_MAX_SLOTS)] = Field([])


class NonFinite(RequestDocument):
    """A value of a step was not finite."""

    kind: Literal["non_finite"]
    step: Count
    what: Line = Field(description="What is not finite: the loss, or the norm of the gradients.")
    value: Line = Field(description="nan, inf or -inf.")


class SkippedCheckpoint(RequestDocument):
    """A checkpoint could not be written, for instance because the disk is full; training goes on."""

    kind: Literal["checkpoint_skipped"]
    step: Count
    reason: Line


class RankEvents(RequestDocument):
    """The events of a rank in one generation; repeated events are ignored."""

    rank: Count
    events: Annotated[
        list[Annotated[NonFinite | SkippedCheckpoint, Field(discriminator="kind")]],
        Field(max_length=MAX_RANK_EVENTS),
    ]


@dataclass(frozen=True)
class RunOrders:
    """What the agents of a run must do."""

    cancel_requested: bool
    stop_requested: bool
    target_plan_id: str | None


@dataclass(frozen=True)
class BeatAnswer:
    """The answer to a heartbeat: the agent's state (None if it is unknown) and the orders of its run."""

    name: str
    state: AgentState | None
    orders: RunOrders | None
