"""Owners of agents, the local token behind a session, and Idempotency-Keys of more than searches."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns.

    Agents that are registered already have no owner: nobody knows which token registered them. The first
    token that acts for such an agent becomes its owner, so that runs under way survive the upgrade.
    Browsers that signed in with a local token have to sign in again.
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
