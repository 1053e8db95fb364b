"""Services that listen to agents, permissions of agents, failures of runs, and indexes for lists."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_moment = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Add the columns. Existing searches have no known requester, so cancelling a run keeps them."""
    op.create_table(
        "listeners",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("looked_at", _moment, nullable=False),
        sa.Column("listening_since", _moment, nullable=False),
    )
    with op.batch_alter_table("agents") as agents:
        agents.add_column(sa.Column("checkpoint_directories", sa.JSON))
        agents.create_index("ix_agents_created_at", ["created_at", "id"])
    with op.batch_alter_table("run_nodes") as nodes:
        nodes.create_index("ix_run_nodes_agent", ["agent_id", "run_id", "generation"])
    _add_filled("runs", "failures", sa.JSON(), [])
    _add_filled("runs", "refusals", sa.JSON(), [])
    _add_filled("searches", "is_wanted_by_client", sa.Boolean(), True)
    with op.batch_alter_table("runs") as runs:
        runs.add_column(sa.Column("waits_for", sa.String))


def _add_filled(table: str, column: str, type_: sa.types.TypeEngine[Any], value: Any) -> None:
    with op.batch_alter_table(table) as altered:
        altered.add_column(sa.Column(column, type_))
    filled = {column: sa.literal(value, type_)}
    op.execute(sa.table(table, sa.column(column, type_)).update().values(filled))
    with op.batch_alter_table(table) as altered:
        altered.alter_column(column, existing_type=type_, nullable=False)
