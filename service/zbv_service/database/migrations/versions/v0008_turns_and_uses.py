"""Turns of searches in the queue, last uses of plans, and indexes for retention."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_INDEXES = (
    ("searches", "plan_id"),
    ("runs", "plan_id"),
    ("runs", "target_plan_id"),
    ("runs", "search_id"),
    ("run_parts", "plan_id"),
    ("agents", "run_id"),
)


def upgrade() -> None:
    """Give all queued searches the same turn, so that the oldest starts first, as before."""
    with op.batch_alter_table("searches") as searches:
        searches.add_column(sa.Column("turn", sa.Integer))
    op.execute("UPDATE searches SET turn = 0")
    with op.batch_alter_table("searches") as searches:
        searches.alter_column("turn", existing_type=sa.Integer, nullable=False)
        searches.create_index("ix_searches_turn", ["state", "turn", "created_at", "id", "created_by"])
        searches.drop_index("ix_searches_created_by")
        searches.create_index("ix_searches_created_by", ["created_by", "state", "turn"])
    with op.batch_alter_table("plans") as plans:
        plans.add_column(sa.Column("used_at", sa.DateTime(timezone=True)))
    for table, column in _INDEXES:
        op.create_index(f"ix_{table}_{column}", table, [column])
