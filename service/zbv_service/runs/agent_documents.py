"""What agents send and get over HTTP, as pydantic models: named schemas of the API."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from zbv_service.documents.shared import NEXT, PREVIOUS, RequestDocument
from zbv_service.records.runs import (
    AgentRecord,
    AgentState,
    FailureKind,
    NewAgent,
    NodeOutcome,
    StopCause,
    Work,
)
from zbv_service.runs.documents import ModelDocument
from zbv_service.runs.options import RunOptionsDocument

Line = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")]
"""Text of one line."""
Directory = Annotated[str, Field(max_length=4000, pattern=r"^/[^\x00-\x1f\x7f]*$")]
Text = Annotated[str, Field(max_length=4000, pattern=r"^[^\x00]*$")]
Identifier = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Count = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]
Port = Annotated[int, Field(strict=True, ge=1, le=65535)]
_MAX_SLOTS = 256
"""Of one node. A heartbeat names every rank of it, and is read while everybody else waits."""
MAX_RANK_EVENTS = 100


class AllowsDocument(RequestDocument):
    """Which runs a node takes. Runs of other models or directories wait for other agents."""

    models: Annotated[list[Line], Field(max_length=100)] = Field(
        [], description="Patterns such as mypackage.models.*; with none, the node takes no run."
    )
    checkpoint_directories: Annotated[list[Directory], Field(max_length=100)] | None = Field(
        None, description="Ranks save checkpoints in these or below; null when the node does not say."
    )


class AgentRequest(RequestDocument):
    """A node that offers to run ranks."""

    id: Identifier = Field(description="Chosen at random by the agent: registering again is the same agent.")
    name: Line = Field(description="The host, as people know it.")
    address: Line = Field(description="Host name or IP address at which the other nodes reach this one.")
    port: Port = Field(description="A free port, where ranks meet when this is a run's first node.")
    slots: Annotated[int, Field(strict=True, ge=1, le=_MAX_SLOTS)] = Field(
        description="Ranks that it runs at the same time."
    )
    devices: Annotated[list[Line], Field(max_length=_MAX_SLOTS)] = Field([])
    versions: Annotated[dict[Line, Line], Field(max_length=50)] = Field({})
    allowed_models: Annotated[list[Line], Field(max_length=100)] = Field(
        [], description="The models of allows, of agents that do not send that."
    )
    allows: AllowsDocument | None = None

    @property
    def new_agent(self) -> NewAgent:
        """The agent as it is stored."""
        told = self.allows or AllowsDocument(models=self.allowed_models)
        return NewAgent(
            **self.model_dump(exclude={"allowed_models", "allows"}),
            allowed_models=told.models,
            checkpoint_directories=told.checkpoint_directories,
        )


class AgentDocument(BaseModel):
    """A registered agent."""

    id: str
    name: str
    address: str
    port: int
    slots: int
    devices: list[str]
    versions: dict[str, str]
    allowed_models: list[str]
    checkpoint_directories: list[str] | None = Field(
        description="Where its ranks may save checkpoints; null when it did not say."
    )
    state: AgentState
    run_id: str | None = Field(description="The run that holds it.")
    created_at: datetime
    seen_at: datetime = Field(description="Its last sign of life.")

    @classmethod
    def of(cls, record: AgentRecord) -> AgentDocument:
        """The document of a stored agent."""
        return cls(**{name: getattr(record, name) for name in cls.model_fields})


class RegisteredAgent(BaseModel):
    """An agent, and what it must keep to."""

    agent: AgentDocument
    heartbeat_seconds: float = Field(description="How often it should give a sign of life.")
    timeout_seconds: float = Field(description="After this long without one it is lost, and its run fails.")


class AgentList(BaseModel):
    """Some of the agents, the newest first."""

    agents: list[AgentDocument]
    next: str | None = NEXT
    previous: str | None = PREVIOUS


class WorkDocument(BaseModel):
    """One node of one generation of a run."""

    run_id: str
    generation: int
    node_rank: int
    nodes: int
    ranks_per_node: int
    rendezvous: str = Field(description="host:port of the first node.")
    plan_id: str = Field(description="The plan's SHA-256: ranks with different ones refuse to start.")
    model: ModelDocument
    steps: int
    options: RunOptionsDocument

    @classmethod
    def of(cls, work: Work) -> WorkDocument:
        """The document of an agent's work."""
        run, node = work.run, work.node
        return cls(
            run_id=run.id,
            generation=node.generation,
            node_rank=node.node_rank,
            nodes=run.nodes,
            ranks_per_node=run.ranks_per_node,
            rendezvous=node.rendezvous,
            plan_id=run.plan_id,
            model=ModelDocument.model_validate(run.model),
            steps=run.steps,
            options=RunOptionsDocument.model_validate(run.options),
        )


class RankPlace(RequestDocument):
    """Where a rank is: the step and the action that it turned to last, null before the first."""

    rank: Count
    step: Count | None = None
    action: Annotated[str, Field(max_length=32, pattern=r"^[0-9]+[FIWB][0-9]+$")] | None = None


class Heartbeat(RequestDocument):
    """A sign of life."""

    port: Port | None = Field(None, description="A port that is free now.")
    run_id: Identifier | None = Field(None, description="The run that the agent works on.")
    ranks: Annotated[list[RankPlace], Field(max_length=_MAX_SLOTS)] = Field([])


class HeartbeatAnswer(BaseModel):
    """What an agent is to do about the run of its heartbeat."""

    stop: bool = Field(description="End its ranks.")
    cause: StopCause | None = Field(
        None, description="Why to stop; after a failure ranks get a moment to say what they know."
    )
    reason: str = Field("", description="The cause, for people.")
    plan_id: str | None = Field(
        None, description="The plan to change over to: the agent of node 0 hands it to its ranks."
    )


class FailureFacts(RequestDocument):
    """Where a failure happened, as far as it is known."""

    rank: Count | None = None
    step: Count | None = None
    action: Annotated[str, Field(max_length=32)] | None = None
    peer: Count | None = Field(None, description="The rank that it waited for.")
    message: Text | None = None


class RankFailure(RequestDocument):
    """Why a rank ended, or why none was started (``rank`` is null then).

    The facts may stand here, or in ``failure``, which counts where both have one.
    """

    kind: FailureKind
    rank: Count | None = None
    step: Count | None = None
    action: Annotated[str, Field(max_length=32)] | None = None
    peer: Count | None = Field(None, description="The rank that it waited for.")
    detail: Text = ""
    failure: FailureFacts | None = None

    def stored(self) -> dict[str, Any]:
        """As it is kept."""
        facts = {} if self.failure is None else self.failure.model_dump(exclude_none=True)
        message = facts.pop("message", "")
        return {
            **self.model_dump(mode="json", exclude={"failure"}),
            **facts,
            "detail": self.detail or message,
        }


class NodeEnd(RequestDocument):
    """How a node's part of a generation ended."""

    run_id: Identifier
    generation: Count
    outcome: NodeOutcome
    failures: Annotated[list[RankFailure], Field(max_length=_MAX_SLOTS)] = Field([])


class RankEvent(RequestDocument):
    """Something that happened on a rank and that people should know: a value that is not finite."""

    kind: Literal["non_finite"]
    step: Count
    what: Line = Field(description="What is not finite: the loss, or the norm of the gradients.")
    value: Line = Field(description="nan, inf or -inf.")


class RankEvents(RequestDocument):
    """What happened on a rank of a generation; events that were sent before are known."""

    rank: Count
    events: Annotated[list[RankEvent], Field(max_length=MAX_RANK_EVENTS)]
