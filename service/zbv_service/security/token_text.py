"""The text of a token: ``zbv_<id>_<secret>``.

The id names its row in the database and may be shown. The secret has 256 random bits, so the database stores
its SHA-256: it cannot be guessed, and a slow hash, which protects passwords that people choose, would only
slow down every request.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass

PREFIX = "zbv"
_FORM = re.compile(rf"{PREFIX}_([0-9a-f]{{12}})_([A-Za-z0-9_-]{{43}})", re.ASCII)


@dataclass(frozen=True)
class TokenText:
    """A parsed token."""

    id: str
    secret: str

    @classmethod
    def new(cls) -> TokenText:
        """A new random token."""
        return cls(secrets.token_hex(6), secrets.token_urlsafe(32))

    @classmethod
    def parse(cls, text: str) -> TokenText | None:
        """Parse a token; None if the text is not a token."""
        found = _FORM.fullmatch(text)
        return None if found is None else cls(found[1], found[2])

    @property
    def hash(self) -> str:
        """The hash to store."""
        return hashlib.sha256(self.secret.encode()).hexdigest()

    def is_hashed_as(self, stored: str) -> bool:
        """Whether a stored hash belongs to this token, compared in constant time."""
        return hmac.compare_digest(self.hash, stored)

    def __str__(self) -> str:
        return f"{PREFIX}_{self.id}_{self.secret}"

    def __repr__(self) -> str:
        return f"TokenText({self.id!r}, …)"  # tracebacks and logs show it
