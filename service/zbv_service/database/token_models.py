"""The table of tokens. Its history is in ``migrations``; a test holds the two together."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import JSON, ForeignKey, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from zbv_service.database.models import Base


class TokenRow(Base):
    """A token, a browser's session, or a link that becomes one.

    ``parent_id`` is the token that a session or link was made with: it ends with it. ``local_id`` names the
    local token instead, which is in no database. The secret itself is nowhere.
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
