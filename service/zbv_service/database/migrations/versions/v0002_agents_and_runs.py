"""Agents and runs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_moment = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Create the four tables."""
    _create_runs()
    _create_agents()
    op.create_table(
        "run_nodes",
        sa.Column("run_id", sa.String(32), sa.ForeignKey("runs.id"), primary_key=True),
        sa.Column("generation", sa.Integer, primary_key=True),
        sa.Column("node_rank", sa.Integer, primary_key=True),
        sa.Column("agent_id", sa.String(32), sa.ForeignKey("agents.id"), nullable=False),
        sa.Column("agent_name", sa.String(200), nullable=False),
        sa.Column("rendezvous", sa.String(300), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("outcome", sa.String(16)),
        sa.Column("ranks", sa.JSON, nullable=False),
        sa.Column("failures", sa.JSON, nullable=False),
        sa.Column("ended_at", _moment),
    )
    op.create_table(
        "run_events",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("run_id", sa.String(32), sa.ForeignKey("runs.id"), nullable=False),
        sa.Column("at", _moment, nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("detail", sa.String, nullable=False),
    )
    op.create_index("ix_run_events_run_id", "run_events", ["run_id", "id"])


def _create_runs() -> None:
    op.create_table(
        "runs",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("plan_id", sa.String(64), sa.ForeignKey("plans.plan_id"), nullable=False),
        sa.Column("model", sa.JSON, nullable=False),
        sa.Column("nodes", sa.Integer, nullable=False),
        sa.Column("ranks_per_node", sa.Integer, nullable=False),
        sa.Column("steps", sa.Integer, nullable=False),
        sa.Column("options", sa.JSON, nullable=False),
        sa.Column("generation", sa.Integer, nullable=False),
        sa.Column("stop_requested", sa.Boolean, nullable=False),
        sa.Column("cancel_requested", sa.Boolean, nullable=False),
        sa.Column("error", sa.JSON),
        sa.Column("created_at", _moment, nullable=False),
        sa.Column("started_at", _moment),
        sa.Column("updated_at", _moment, nullable=False),
        sa.Column("finished_at", _moment),
    )
    op.create_index("ix_runs_created_at", "runs", ["created_at", "id"])
    op.create_index("ix_runs_state", "runs", ["state", "created_at"])


def _create_agents() -> None:
    op.create_table(
        "agents",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("address", sa.String(255), nullable=False),
        sa.Column("port", sa.Integer, nullable=False),
        sa.Column("slots", sa.Integer, nullable=False),
        sa.Column("devices", sa.JSON, nullable=False),
        sa.Column("versions", sa.JSON, nullable=False),
        sa.Column("allowed_models", sa.JSON, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("run_id", sa.String(32), sa.ForeignKey("runs.id")),
        sa.Column("created_at", _moment, nullable=False),
        sa.Column("seen_at", _moment, nullable=False),
    )
    op.create_index("ix_agents_state", "agents", ["state", "created_at"])
