"""Runs that search, change and measure their plans; traces and logs of ranks."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Let a run get its plan later and change it; add a table for artifacts of ranks."""
    with op.batch_alter_table("runs") as runs:
        runs.alter_column("plan_id", existing_type=sa.String(64), nullable=True)
        runs.add_column(sa.Column("search_id", sa.String(32)))
        runs.add_column(sa.Column("search_options", sa.JSON))
        runs.add_column(sa.Column("target_plan_id", sa.String(64)))
        runs.add_column(sa.Column("offer", sa.JSON))
        runs.add_column(sa.Column("replanning", sa.JSON))
        runs.create_foreign_key("runs_search_id_fkey", "searches", ["search_id"], ["id"])
        runs.create_foreign_key("runs_target_plan_id_fkey", "plans", ["target_plan_id"], ["plan_id"])
    op.create_table(
        "run_parts",
        sa.Column("run_id", sa.String(32), sa.ForeignKey("runs.id"), primary_key=True),
        sa.Column("generation", sa.Integer, primary_key=True),
        sa.Column("rank", sa.Integer, primary_key=True),
        sa.Column("kind", sa.String(16), primary_key=True),
        sa.Column("plan_id", sa.String(64)),
        sa.Column("pp_rank", sa.Integer),
        sa.Column("replica", sa.Integer),
        sa.Column("last_step", sa.Integer),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
    )
