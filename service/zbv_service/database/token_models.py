"""The table of tokens. ``migrations`` has its history; a test compares the two."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import JSON, ForeignKey, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from zbv_service.database.models import Base


class TokenRow(Base):
    """A token, a browser session, or a sign-in link that becomes a session.

    A session or link ends with the token that made it: ``parent_id``, or ``local_id`` for the local token,
    which is in no database. Only a hash of the secret is stored.
    """

    __tablename__ = "tokens"

    id: Mapped[str] = mapped_column(String(16), primary_key=True)
    kind: Mapped[str] = mapped_column(String(16))
    name: Mapped[str] = mapped_column(String(200))
    secret_hash: Mapped[str] = mapped_column(String(64))
    scopes: Mapped[list[str]] = mapped_column(JSON)
    parent_id: Mapped[str | None] = mapped_column(String(16), ForeignKey("tokens.id"))
    local_id: Mapped[str | None] = mapped_column(String(16))
    max_searches: Mapped[int | None]
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    used_at: Mapped[datetime | None]

    __table_args__ = (Index("ix_tokens_name", "name"), Index("ix_tokens_parent_id", "parent_id"))
