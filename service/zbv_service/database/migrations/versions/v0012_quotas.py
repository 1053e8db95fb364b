"""Who imported a plan and who sent an Idempotency-Key, and indexes to count what a token has stored."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns and indexes. Earlier plans and keys belong to nobody."""
    for table in ("plans", "idempotency_keys"):
        with op.batch_alter_table(table) as changed:
            changed.add_column(sa.Column("created_by", sa.String(200)))
            changed.create_index(f"ix_{table}_created_by", ["created_by"])
    op.create_index("ix_runs_created_by", "runs", ["created_by"])
    op.create_index("ix_agents_owner", "agents", ["owner", "state"])
    op.create_index("ix_tokens_local_id", "tokens", ["local_id"])
