"""Tokens, and the creators of searches and runs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_moment = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Add a table of tokens; searches and runs store the name of the token that created them."""
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(16), primary_key=True),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("secret_hash", sa.String(64), nullable=False),
        sa.Column("scopes", sa.JSON, nullable=False),
        sa.Column("parent_id", sa.String(16), sa.ForeignKey("tokens.id")),
        sa.Column("max_searches", sa.Integer),
        sa.Column("created_at", _moment, nullable=False),
        sa.Column("expires_at", _moment),
        sa.Column("revoked_at", _moment),
        sa.Column("used_at", _moment),
    )
    op.create_index("ix_tokens_name", "tokens", ["name"])
    op.create_index("ix_tokens_parent_id", "tokens", ["parent_id"])
    with op.batch_alter_table("searches") as searches:
        searches.add_column(sa.Column("created_by", sa.String(200)))
        searches.create_index("ix_searches_created_by", ["created_by", "state"])
    with op.batch_alter_table("runs") as runs:
        runs.add_column(sa.Column("created_by", sa.String(200)))
