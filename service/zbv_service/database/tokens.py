"""Reads and writes tokens, browser sessions and sign-in links."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, cast

from sqlalchemy import ColumnElement, CursorResult, and_, delete, or_, select, update
from sqlalchemy.orm import aliased

from zbv_service.database.engine import BaseTable
from zbv_service.database.models import TokenRow, record_of
from zbv_service.records.tokens import NewToken, TokenRecord


class TokenNameTaken(Exception):
    """A valid token already has this name."""


class TokenTable(BaseTable):
    """The tokens of one database."""

    async def add(self, new: NewToken) -> TokenRecord:
        """Store a token, session or link, and remove expired sessions and links.

        Raises
        ------
        TokenNameTaken
            A valid token already has this name.
        """
        row = TokenRow(**asdict(new))
        now = datetime.now(UTC)
        async with self._database.writing() as session:
            await session.execute(
                delete(TokenRow).where(TokenRow.kind != "token", TokenRow.expires_at <= now)
            )
            named = select(TokenRow.id).where(TokenRow.kind == "token", TokenRow.name == new.name, _live(now))
            if new.kind == "token" and await session.scalar(named.limit(1)) is not None:
                raise TokenNameTaken(new.name)
            session.add(row)
            await session.flush()
        return _record(row)

    async def live(self, token_id: str) -> TokenRecord | None:
        """A valid token with a valid parent, None otherwise."""
        parent = aliased(TokenRow)
        now = datetime.now(UTC)
        query = select(TokenRow).outerjoin(parent, TokenRow.parent_id == parent.id)
        revoked = [parent.revoked_at.is_(None), or_(parent.expires_at.is_(None), parent.expires_at > now)]
        async with self._database.reading() as session:
            row = await session.scalar(query.where(TokenRow.id == token_id, _live(now), *revoked))
            return None if row is None else _record(row)

    async def get(self, token_id: str) -> TokenRecord | None:
        """A token by id, valid or not."""
        async with self._database.reading() as session:
            row = await session.get(TokenRow, token_id)
            return None if row is None else _record(row)

    async def tokens(self) -> list[TokenRecord]:
        """All tokens without sessions and links, oldest first."""
        query = select(TokenRow).where(TokenRow.kind == "token").order_by(TokenRow.created_at, TokenRow.id)
        async with self._database.reading() as session:
            return [_record(row) for row in await session.scalars(query)]

    async def has_any(self) -> bool:
        """Whether a valid token exists."""
        query = select(TokenRow.id).where(TokenRow.kind == "token", _live(datetime.now(UTC))).limit(1)
        return bool(await self._database.rows(query))

    async def revoke(self, name_or_id: str) -> list[TokenRecord]:
        """Revoke the valid tokens with this name or id, together with their sessions and links."""
        now = datetime.now(UTC)
        either = or_(TokenRow.id == name_or_id, TokenRow.name == name_or_id)
        query = select(TokenRow).where(TokenRow.kind == "token", either, _live(now))
        async with self._database.writing() as session:
            rows = list(await session.scalars(query))
            for row in rows:
                row.revoked_at = now
        return [_record(row) for row in rows]

    async def remove(self, token_id: str) -> None:
        """Remove a session or link."""
        statement = delete(TokenRow).where(TokenRow.id == token_id, TokenRow.kind != "token")
        async with self._database.writing() as session:
            await session.execute(statement)

    async def redeem(self, link_id: str) -> bool:
        """Use a link; False if it was already used."""
        unused = and_(TokenRow.id == link_id, TokenRow.kind == "link", TokenRow.used_at.is_(None))
        statement = update(TokenRow).where(unused).values(used_at=datetime.now(UTC))
        async with self._database.writing() as session:
            return cast("CursorResult[Any]", await session.execute(statement)).rowcount == 1

    async def used(self, token_id: str) -> None:
        """Record that a token was used."""
        statement = update(TokenRow).where(TokenRow.id == token_id).values(used_at=datetime.now(UTC))
        async with self._database.writing() as session:
            await session.execute(statement)


def _live(now: datetime) -> ColumnElement[bool]:
    unexpired = or_(TokenRow.expires_at.is_(None), TokenRow.expires_at > now)
    return and_(TokenRow.revoked_at.is_(None), unexpired)


def _record(row: TokenRow) -> TokenRecord:
    return record_of(TokenRecord, row, scopes=tuple(row.scopes))
