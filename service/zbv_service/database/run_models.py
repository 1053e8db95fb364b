"""The tables of agents and runs. ``migrations`` has their history; a test compares the two."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, ForeignKey, Index, LargeBinary, String
from sqlalchemy.orm import Mapped, mapped_column

from zbv_service.database.models import Base


class RunRow(Base):
    """A run; this row is the source of truth about it.

    It has either a model and steps, or a script.
    ``failures`` has the cause of each failed generation, ``refusals`` the agents that refused the run, and
    ``waits_for`` says what a waiting run lacks. ``key_hash`` and ``key_fingerprint`` are those of its
    :class:`zbv_service.records.runs.RequestKey`.
    """

    __tablename__ = "runs"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    state: Mapped[str] = mapped_column(String(16))
    plan_id: Mapped[str | None] = mapped_column(String(64), ForeignKey("plans.plan_id"))
    search_id: Mapped[str | None] = mapped_column(String(32), ForeignKey("searches.id", ondelete="SET NULL"))
    search_options: Mapped[bytes | None] = mapped_column(LargeBinary, deferred=True)
    target_plan_id: Mapped[str | None] = mapped_column(String(64), ForeignKey("plans.plan_id"))
    offer: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    replanning: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    model: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    script: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    nodes: Mapped[int]
    ranks_per_node: Mapped[int]
    steps: Mapped[int | None]
    options: Mapped[dict[str, Any]]
    generation: Mapped[int]
    stop_requested: Mapped[bool]
    cancel_requested: Mapped[bool]
    error: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    failures: Mapped[list[dict[str, Any]]] = mapped_column(JSON)
    refusals: Mapped[list[dict[str, Any]]] = mapped_column(JSON)
    waits_for: Mapped[str | None]
    created_at: Mapped[datetime]
    created_by: Mapped[str | None] = mapped_column(String(200))
    started_at: Mapped[datetime | None]
    updated_at: Mapped[datetime]
    finished_at: Mapped[datetime | None]
    key_hash: Mapped[str | None] = mapped_column(String(64), unique=True)
    key_fingerprint: Mapped[str | None] = mapped_column(String(64))

    __table_args__ = (
        Index("ix_runs_created_at", "created_at", "id"),
        Index("ix_runs_state", "state", "created_at"),
        Index("ix_runs_created_by", "created_by"),
        Index("ix_runs_plan_id", "plan_id"),
        Index("ix_runs_target_plan_id", "target_plan_id"),
        Index("ix_runs_search_id", "search_id"),
    )


class AgentRow(Base):
    """An agent. It has one ``run_id``, so two runs cannot share it.

    ``seen_at`` is deliberately not indexed, so that a heartbeat updates no index.
    """

    __tablename__ = "agents"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    name: Mapped[str] = mapped_column(String(200))
    address: Mapped[str] = mapped_column(String(255))
    port: Mapped[int]
    slots: Mapped[int]
    devices: Mapped[list[str]] = mapped_column(JSON)
    versions: Mapped[dict[str, Any]]
    allowed_models: Mapped[list[str]] = mapped_column(JSON)
    allowed_scripts: Mapped[list[str]] = mapped_column(JSON)
    checkpoint_directories: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    state: Mapped[str] = mapped_column(String(16))
    run_id: Mapped[str | None] = mapped_column(String(32), ForeignKey("runs.id"))
    owner: Mapped[str] = mapped_column(String(16))
    created_at: Mapped[datetime]
    seen_at: Mapped[datetime]

    __table_args__ = (
        Index("ix_agents_state", "state", "created_at"),
        Index("ix_agents_created_at", "created_at", "id"),
        Index("ix_agents_run_id", "run_id"),
        Index("ix_agents_owner", "owner", "state"),
    )


class ListenerRow(Base):
    """A service that listens to agents: when it last checked in, and since when without a pause."""

    __tablename__ = "listeners"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    looked_at: Mapped[datetime]
    listening_since: Mapped[datetime]


class NodeRow(Base):
    """The part of one agent in one generation of a run."""

    __tablename__ = "run_nodes"

    run_id: Mapped[str] = mapped_column(
        String(32), ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True
    )
    generation: Mapped[int] = mapped_column(primary_key=True)
    node_rank: Mapped[int] = mapped_column(primary_key=True)
    agent_id: Mapped[str] = mapped_column(String(32), ForeignKey("agents.id"))
    agent_name: Mapped[str] = mapped_column(String(200))
    rendezvous: Mapped[str] = mapped_column(String(300))
    state: Mapped[str] = mapped_column(String(16))
    outcome: Mapped[str | None] = mapped_column(String(16))
    ranks: Mapped[list[dict[str, Any]]] = mapped_column(JSON)
    failures: Mapped[list[dict[str, Any]]] = mapped_column(JSON, deferred=True)
    ended_at: Mapped[datetime | None]

    __table_args__ = (Index("ix_run_nodes_agent", "agent_id", "run_id", "generation"),)


class EventRow(Base):
    """An event of a run."""

    __tablename__ = "run_events"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    run_id: Mapped[str] = mapped_column(String(32), ForeignKey("runs.id", ondelete="CASCADE"))
    at: Mapped[datetime]
    kind: Mapped[str] = mapped_column(String(32))
    detail: Mapped[str] = mapped_column(String)

    __table_args__ = (Index("ix_run_events_run_id", "run_id", "id"),)


class PartRow(Base):
    """An artifact of one rank in one generation: its trace or the end of its log. The latest one wins."""

    __tablename__ = "run_parts"

    run_id: Mapped[str] = mapped_column(
        String(32), ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True
    )
    generation: Mapped[int] = mapped_column(primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(String(16), primary_key=True)
    plan_id: Mapped[str | None] = mapped_column(String(64))
    pp_rank: Mapped[int | None]
    replica: Mapped[int | None]
    last_step: Mapped[int | None]
    body: Mapped[bytes] = mapped_column(LargeBinary, deferred=True)
    updated_at: Mapped[datetime]

    __table_args__ = (Index("ix_run_parts_plan_id", "plan_id"),)
