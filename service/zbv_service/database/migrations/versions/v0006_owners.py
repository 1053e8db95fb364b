"""Owners of agents, the local token behind a session, and Idempotency-Keys for runs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns.

    Existing agents have no owner, because the token that registered them is unknown. The first token that
    acts for such an agent becomes its owner, so that active runs survive the upgrade. Browsers that signed in
    with a local token must sign in again.
    """
    with op.batch_alter_table("agents") as agents:
        agents.add_column(sa.Column("owner", sa.String(16)))
    with op.batch_alter_table("tokens") as tokens:
        tokens.add_column(sa.Column("local_id", sa.String(16)))
    with op.batch_alter_table("idempotency_keys") as keys:
        keys.alter_column("search_id", new_column_name="resource_id", existing_type=sa.String(32))
        keys.add_column(sa.Column("kind", sa.String(16), nullable=False, server_default="search"))
    with op.batch_alter_table("idempotency_keys") as keys:
        keys.alter_column("kind", existing_type=sa.String(16), server_default=None)
