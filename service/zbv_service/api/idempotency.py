"""The header ``Idempotency-Key``: a caller's key for a request, so that a repeated request runs only once.

It follows the draft "The Idempotency-Key HTTP Header Field" of the IETF's HTTPAPI group. There the value is a
structured string in double quotes (RFC 9651); most clients leave the quotes out, so both forms are accepted.
"""

from __future__ import annotations

import re
from typing import Any

from fastapi import Request

from zbv_service.errors import INVALID_IDEMPOTENCY_KEY, ApiError
from zbv_service.searches.idempotency import fingerprint_of
from zbv_service.security.grants import grant_of

HEADER = "Idempotency-Key"
MAX_LENGTH = 255
_QUOTED = re.compile(r'"((?:[\x20\x21\x23-\x5b\x5d-\x7e]|\\["\\])*)"')
_ESCAPED = re.compile(r'\\(["\\])')
_BARE = re.compile(r"[\x21\x23-\x2b\x2d-\x3a\x3c-\x5b\x5d-\x7e]+")

KEY_PARAMETER: dict[str, Any] = {
    "name": HEADER,
    "in": "header",
    "required": False,
    "description": "A key, so that a repeated request runs only once. Each token has its own keys. A "
    "key is remembered for a day by default; until then the answer is the resource that "
    "the first request created, even if it was cancelled since.",
    "schema": {"type": "string", "maxLength": MAX_LENGTH + 2},
}
"""The OpenAPI parameter of a route that accepts the header."""


def request_key(request: Request) -> str | None:
    """The hash of the caller and its key for the request, None without a key.

    Raises
    ------
    ApiError
        400: there are several keys, or the key is empty, too long or has invalid characters.
    """
    values = request.headers.getlist(HEADER)
    if not values:
        return None
    if len(values) > 1:
        raise _invalid(f"found {len(values)} of them; send one.")
    value = values[0].strip()
    quoted = _QUOTED.fullmatch(value)
    key = _ESCAPED.sub(r"\1", quoted[1]) if quoted else value
    if not (quoted or _BARE.fullmatch(value)):
        raise _invalid(
            "it must be visible ASCII characters in double quotes; without quotes also no comma, semicolon, "
            "backslash or space. Send a UUID."
        )
    if not 1 <= len(key) <= MAX_LENGTH:
        raise _invalid(f"found {len(key)} characters; it must have 1 to {MAX_LENGTH}. Send a UUID.")
    return fingerprint_of([grant_of(request).owner, key])


def _invalid(why: str) -> ApiError:
    return ApiError(INVALID_IDEMPOTENCY_KEY, f"{HEADER}: {why}")
