"""Answers requests with an Idempotency-Key once, for searches and runs.

:mod:`zbv_service.api.idempotency` reads the header; :mod:`zbv_service.database.named_requests` stores the
keys.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from zbv_service.database import KeyReused
from zbv_service.errors import IDEMPOTENCY_KEY_IN_USE, IDEMPOTENCY_KEY_REUSED, ApiError
from zbv_service.observability.context import CALLER
from zbv_service.records.searches import NamedRequest, RequestKind


class NamedRequests:
    """The requests with an Idempotency-Key, of one kind, that this process is answering.

    Parameters
    ----------
    seconds
        How long keys are remembered.
    """

    def __init__(self, kind: RequestKind, seconds: float):
        self._kind = kind
        self._lifetime = timedelta(seconds=seconds)
        self._in_flight: set[str] = set()

    @asynccontextmanager
    async def answering(self, key_hash: str | None) -> AsyncIterator[Callable[[str], NamedRequest | None]]:
        """Answer a request inside the block.

        Parameters
        ----------
        key_hash
            Hash of the caller and the key; None without a key.

        Yields
        ------
        A function from the body's fingerprint to the record to store with the new resource; None without a
        key.

        Raises
        ------
        ApiError
            409: a request with the same key is being answered here. 422: the key belongs to another request.
        """
        if key_hash is None:
            yield lambda fingerprint: None
            return
        if key_hash in self._in_flight:
            raise ApiError(
                IDEMPOTENCY_KEY_IN_USE,
                "The first request with this Idempotency-Key is not answered yet; send it again in a second.",
                headers={"Retry-After": "1"},
            )
        expires_at = datetime.now(UTC) + self._lifetime
        self._in_flight.add(key_hash)
        try:
            yield lambda fingerprint: NamedRequest(
                key_hash, fingerprint, expires_at, self._kind, CALLER.get()
            )
        except KeyReused:
            raise ApiError(
                IDEMPOTENCY_KEY_REUSED,
                "This Idempotency-Key came with another body or to another address before; a new request "
                "needs a new key.",
            ) from None
        finally:
            self._in_flight.discard(key_hash)


def fingerprint_of(value: Any) -> str:
    """A hash of a decoded JSON document that does not depend on the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
