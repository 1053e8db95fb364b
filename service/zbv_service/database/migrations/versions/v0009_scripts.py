"""Runs of scripts, and the scripts that agents allow."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns. Existing agents allow no scripts until they register again."""
    with op.batch_alter_table("runs") as runs:
        runs.add_column(sa.Column("script", sa.JSON))
        runs.alter_column("model", existing_type=sa.JSON, nullable=True)
        runs.alter_column("steps", existing_type=sa.Integer, nullable=True)
    with op.batch_alter_table("agents") as agents:
        agents.add_column(sa.Column("allowed_scripts", sa.JSON))
    op.execute("UPDATE agents SET allowed_scripts = '[]'")
    with op.batch_alter_table("agents") as agents:
        agents.alter_column("allowed_scripts", existing_type=sa.JSON, nullable=False)
