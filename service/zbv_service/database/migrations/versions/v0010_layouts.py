"""Searches of layouts, and the plans that their answers name."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_SHAPE: dict[str, sa.types.TypeEngine[Any]] = {
    "pp_degree": sa.Integer(),
    "microbatches": sa.Integer(),
    "placement": sa.String(16),
    "problem_objective": sa.String(16),
}


def upgrade() -> None:
    """Add the columns and the table. All earlier searches are for plans."""
    with op.batch_alter_table("searches") as searches:
        searches.add_column(sa.Column("kind", sa.String(16)))
        searches.add_column(sa.Column("progress", sa.JSON))
        searches.add_column(sa.Column("answer", sa.LargeBinary))
        for name, kind in _SHAPE.items():
            searches.alter_column(name, existing_type=kind, nullable=True)
    op.execute("UPDATE searches SET kind = 'plan'")
    with op.batch_alter_table("searches") as searches:
        searches.alter_column("kind", existing_type=sa.String(16), nullable=False)
        searches.create_index("ix_searches_kind", ["kind", "created_at", "id"])
    op.create_table(
        "search_plans",
        sa.Column("search_id", sa.String(32), sa.ForeignKey("searches.id"), primary_key=True),
        sa.Column("plan_id", sa.String(64), sa.ForeignKey("plans.plan_id"), primary_key=True),
    )
    op.create_index("ix_search_plans_plan_id", "search_plans", ["plan_id"])
