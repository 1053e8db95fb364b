"""The tables. A test compares them with what the migrations build."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, ForeignKey, Index, LargeBinary, String
from sqlalchemy.orm import Mapped, mapped_column

from zbv_service.database.engine import Base
from zbv_service.records.shared import MAX_NAME


class PlanRow(Base):
    """A plan, immutable under its hash. ``used_at`` is when it was last fetched or found again.

    ``created_by`` is the token that imported it; plans of searches have none.
    """

    __tablename__ = "plans"

    plan_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    document: Mapped[bytes] = mapped_column(LargeBinary, deferred=True)
    problem_key: Mapped[str] = mapped_column(String(64))
    pp_degree: Mapped[int]
    microbatches: Mapped[int]
    placement: Mapped[str] = mapped_column(String(16))
    objective: Mapped[str] = mapped_column(String(16))
    value: Mapped[float]
    lower_bound: Mapped[float]
    gap: Mapped[float | None]
    status: Mapped[str] = mapped_column(String(16))
    bubble_rate: Mapped[float]
    method: Mapped[str] = mapped_column(String(200))
    time_unit: Mapped[str | None] = mapped_column(String(32))
    created_at: Mapped[datetime]
    created_by: Mapped[str | None] = mapped_column(String(200))
    used_at: Mapped[datetime | None]

    __table_args__ = (
        Index("ix_plans_created_at", "created_at", "plan_id"),
        Index("ix_plans_created_by", "created_by"),
        Index("ix_plans_shape", "pp_degree", "microbatches", "created_at"),
        Index("ix_plans_problem_key", "problem_key", "value"),
    )


class SearchRow(Base):
    """A search; this row is the source of truth about it.

    A cancelled or failed search sets ``request_key`` to null, so that the same request starts a new search.
    ``problem_objective`` names the quantity to minimise, ``objective`` is the best value so far.
    ``last_event`` is the number of the newest event; the transaction that adds an event increases it.
    ``is_wanted_by_client`` is false while only runs have asked for the search; it is cancelled when the last
    of them no longer needs it. ``turn`` orders the queue: the searches of one caller have increasing turns,
    and the first search of a caller without queued searches gets the turn that is being served. This serves
    callers round-robin. A search of layouts has its request as ``problem``, no shape, and the ranking as
    ``answer``.
    """

    __tablename__ = "searches"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    kind: Mapped[str] = mapped_column(String(16))
    name: Mapped[str | None] = mapped_column(String(MAX_NAME))
    request_key: Mapped[str | None] = mapped_column(String(64), unique=True)
    state: Mapped[str] = mapped_column(String(16))
    summary: Mapped[dict[str, Any]]
    pp_degree: Mapped[int | None]
    microbatches: Mapped[int | None]
    placement: Mapped[str | None] = mapped_column(String(16))
    problem_objective: Mapped[str | None] = mapped_column(String(16))
    options: Mapped[dict[str, Any]]
    jitter: Mapped[bytes | None] = mapped_column(LargeBinary, deferred=True)
    problem: Mapped[bytes] = mapped_column(LargeBinary, deferred=True)
    incumbent: Mapped[bytes | None] = mapped_column(LargeBinary, deferred=True)
    objective: Mapped[float | None]
    lower_bound: Mapped[float | None]
    gap: Mapped[float | None]
    method: Mapped[str | None] = mapped_column(String(200))
    progress: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    answer: Mapped[bytes | None] = mapped_column(LargeBinary, deferred=True)
    plan_id: Mapped[str | None] = mapped_column(String(64), ForeignKey("plans.plan_id"))
    error: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    cancel_requested: Mapped[bool]
    is_wanted_by_client: Mapped[bool]
    attempts: Mapped[int]
    crashes: Mapped[int]
    fence: Mapped[int]
    lease_owner: Mapped[str | None] = mapped_column(String(200))
    leased_until: Mapped[datetime | None]
    created_at: Mapped[datetime]
    created_by: Mapped[str | None] = mapped_column(String(200))
    started_at: Mapped[datetime | None]
    updated_at: Mapped[datetime]
    finished_at: Mapped[datetime | None]
    last_event: Mapped[int]
    turn: Mapped[int]

    __table_args__ = (
        Index("ix_searches_created_at", "created_at", "id"),
        Index("ix_searches_kind", "kind", "created_at", "id"),
        Index("ix_searches_state", "state", "created_at"),
        Index("ix_searches_queue", "state", "cancel_requested", "created_at"),
        Index("ix_searches_turn", "state", "turn", "created_at", "id", "created_by"),
        Index("ix_searches_plan_id", "plan_id"),
        Index("ix_searches_shape", "pp_degree", "microbatches", "created_at"),
        Index("ix_searches_created_by", "created_by", "state", "turn"),
    )


class SearchPlanRow(Base):
    """A plan that the answer of a search of layouts names; it stays as long as the search."""

    __tablename__ = "search_plans"

    search_id: Mapped[str] = mapped_column(
        String(32), ForeignKey("searches.id", ondelete="CASCADE"), primary_key=True
    )
    plan_id: Mapped[str] = mapped_column(String(64), ForeignKey("plans.plan_id"), primary_key=True)

    __table_args__ = (Index("ix_search_plans_plan_id", "plan_id"),)


class SearchEventRow(Base):
    """An event of a search, numbered from 1 within the search."""

    __tablename__ = "search_events"

    search_id: Mapped[str] = mapped_column(
        String(32), ForeignKey("searches.id", ondelete="CASCADE"), primary_key=True
    )
    number: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[datetime]
    kind: Mapped[str] = mapped_column(String(16))
    data: Mapped[dict[str, Any]]


class TokenRow(Base):
    """A token, a browser session, or a sign-in link that becomes a session.

    A session or link ends with the token that made it: ``parent_id``, or ``local_id`` for the local token,
    which is in no database. Only a hash of the secret is stored.
    """

    __tablename__ = "tokens"

    id: Mapped[str] = mapped_column(String(16), primary_key=True)
    kind: Mapped[str] = mapped_column(String(16))
    name: Mapped[str] = mapped_column(String(200))
    secret_hash: Mapped[str] = mapped_column(String(64))
    scopes: Mapped[list[str]] = mapped_column(JSON)
    parent_id: Mapped[str | None] = mapped_column(String(16), ForeignKey("tokens.id", ondelete="CASCADE"))
    local_id: Mapped[str | None] = mapped_column(String(16))
    max_searches: Mapped[int | None]
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    used_at: Mapped[datetime | None]

    __table_args__ = (
        Index("ix_tokens_name", "name"),
        Index("ix_tokens_parent_id", "parent_id"),
        Index("ix_tokens_local_id", "local_id"),
    )


class RunRow(Base):
    """A run; this row is the source of truth about it.

    It has either a model and steps, or a script.
    ``failures`` has the cause of each failed generation, ``refusals`` the agents that refused the run, and
    ``waits_for`` says what a waiting run lacks. ``key_hash`` and ``key_fingerprint`` are those of its
    :class:`zbv_service.records.runs.RequestKey`.
    """

    __tablename__ = "runs"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    name: Mapped[str | None] = mapped_column(String(MAX_NAME))
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
