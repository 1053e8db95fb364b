"""Requests with an Idempotency-Key. Each is stored in the transaction that creates its resource."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime

from sqlalchemy import delete
from sqlalchemy.ext.asyncio import AsyncSession

from zbv_service.database.models import IdempotencyRow
from zbv_service.records.searches import NamedRequest


class KeyReused(Exception):
    """The caller used the same key for a request with another address or another body."""


async def answered_with(session: AsyncSession, named: NamedRequest) -> str | None:
    """The id of the resource that an earlier request with this key created or found, None without one.

    Raises
    ------
    KeyReused
        The earlier request had another address or body.
    """
    known = await session.get(IdempotencyRow, named.key_hash)
    if known is None or known.expires_at <= datetime.now(UTC):
        return None
    if (known.kind, known.fingerprint) != (named.kind, named.fingerprint):
        raise KeyReused
    return known.resource_id


async def remember(session: AsyncSession, named: NamedRequest, resource_id: str) -> None:
    """Record the resource that a request created or found; an expired key can be used again.

    If another transaction has stored the same key in the meantime, this one fails with SQLAlchemy's
    IntegrityError; the caller must look again.
    """
    same, expired = IdempotencyRow.key_hash == named.key_hash, IdempotencyRow.expires_at <= datetime.now(UTC)
    await session.execute(delete(IdempotencyRow).where(same, expired))
    session.add(IdempotencyRow(**asdict(named), resource_id=resource_id))
    await session.flush()
