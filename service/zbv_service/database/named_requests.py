"""Requests that carry an Idempotency-Key; each is stored in the transaction that creates what it asks for."""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy import delete
from sqlalchemy.ext.asyncio import AsyncSession

from zbv_service.database.models import IdempotencyRow
from zbv_service.records.searches import NamedRequest


class NameTaken(Exception):
    """The caller gave the same name to another request: another address or another body."""


async def answered_with(session: AsyncSession, named: NamedRequest) -> str | None:
    """The id of what a request of this name created or found before; None when there was no such request.

    Raises
    ------
    NameTaken
        When it was another request.
    """
    known = await session.get(IdempotencyRow, named.key_hash)
    if known is None or known.expires_at <= datetime.now(UTC):
        return None
    if (known.kind, known.fingerprint) != (named.kind, named.fingerprint):
        raise NameTaken
    return known.resource_id


async def remember(session: AsyncSession, named: NamedRequest, resource_id: str) -> None:
    """Note what a named request created or found; an expired name can be used again.

    A request of the same name that another transaction has stored meanwhile makes this one fail with
    sqlalchemy's IntegrityError; look again then.
    """
    same, expired = IdempotencyRow.key_hash == named.key_hash, IdempotencyRow.expires_at <= datetime.now(UTC)
    await session.execute(delete(IdempotencyRow).where(same, expired))
    session.add(
        IdempotencyRow(
            key_hash=named.key_hash,
            fingerprint=named.fingerprint,
            kind=named.kind,
            resource_id=resource_id,
            expires_at=named.expires_at,
        )
    )
    await session.flush()
