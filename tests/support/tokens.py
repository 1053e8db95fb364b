"""Tokens for services that require them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
from zbv_service.database import Database
from zbv_service.security.tokens import Token, TokenTable, TokenText

from support.serving import Service


async def add_token(
    database: Database, *scopes: str, name: str = "tester", seconds: float | None = None, **more: Any
) -> str:
    """A token, as ``zbv-service token create`` stores it."""
    text, now = TokenText.new(), datetime.now(UTC)
    new = Token(
        id=text.id,
        kind="token",
        name=name,
        secret_hash=text.hash,
        scopes=scopes,
        created_at=now,
        expires_at=None if seconds is None else now + timedelta(seconds=seconds),
        **more,
    )
    await TokenTable(database).add(new)
    return str(text)


async def add(service: Service, *scopes: str, **more: Any) -> dict[str, str]:
    """The header fields of a caller with a new token."""
    database: Database = service.app.state.application.database
    return bearer(await add_token(database, *scopes, **more))


def bearer(token: str) -> dict[str, str]:
    """The header fields that carry a token."""
    return {"Authorization": f"Bearer {token}"}


def kind_of(answer: httpx.Response) -> str:
    """The type of a problem document."""
    return str(answer.json()["type"]).removeprefix("/errors/")
