"""Searches and plans."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_moment = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Create both tables."""
    op.create_table(
        "plans",
        sa.Column("plan_id", sa.String(64), primary_key=True),
        sa.Column("document", sa.LargeBinary, nullable=False),
        sa.Column("pp_degree", sa.Integer, nullable=False),
        sa.Column("microbatches", sa.Integer, nullable=False),
        sa.Column("placement", sa.String(16), nullable=False),
        sa.Column("objective", sa.String(16), nullable=False),
        sa.Column("value", sa.Double, nullable=False),
        sa.Column("lower_bound", sa.Double, nullable=False),
        sa.Column("gap", sa.Double),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("bubble_rate", sa.Double, nullable=False),
        sa.Column("method", sa.String(200), nullable=False),
        sa.Column("time_unit", sa.String(32)),
        sa.Column("created_at", _moment, nullable=False),
    )
    op.create_index("ix_plans_created_at", "plans", ["created_at", "plan_id"])
    op.create_table(
        "searches",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("request_key", sa.String(64), unique=True),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("summary", sa.JSON, nullable=False),
        sa.Column("options", sa.JSON, nullable=False),
        sa.Column("problem", sa.LargeBinary, nullable=False),
        sa.Column("incumbent", sa.LargeBinary),
        sa.Column("objective", sa.Double),
        sa.Column("lower_bound", sa.Double),
        sa.Column("gap", sa.Double),
        sa.Column("method", sa.String(200)),
        sa.Column("plan_id", sa.String(64), sa.ForeignKey("plans.plan_id")),
        sa.Column("error", sa.JSON),
        sa.Column("cancel_requested", sa.Boolean, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("crashes", sa.Integer, nullable=False),
        sa.Column("fence", sa.Integer, nullable=False),
        sa.Column("lease_owner", sa.String(200)),
        sa.Column("leased_until", _moment),
        sa.Column("created_at", _moment, nullable=False),
        sa.Column("started_at", _moment),
        sa.Column("updated_at", _moment, nullable=False),
        sa.Column("finished_at", _moment),
    )
    op.create_index("ix_searches_created_at", "searches", ["created_at", "id"])
    op.create_index("ix_searches_state", "searches", ["state", "created_at"])
