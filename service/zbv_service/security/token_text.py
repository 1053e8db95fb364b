"""What a token looks like: ``zbv_<id>_<secret>``.

The id names its row in the database and may be shown. The secret is 256 random bits, so its SHA-256 is all
that is stored: guessing it is hopeless, and a slow hash, which is for passwords that people choose, would
only slow every request down.
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
    """A token, taken apart."""

    id: str
    secret: str

    @classmethod
    def new(cls) -> TokenText:
        """A token that nobody has."""
        return cls(secrets.token_hex(6), secrets.token_urlsafe(32))

    @classmethod
    def parse(cls, text: str) -> TokenText | None:
        """None when the text is no token."""
        found = _FORM.fullmatch(text)
        return None if found is None else cls(found[1], found[2])

    @property
    def hash(self) -> str:
        """What is stored of it."""
        return hashlib.sha256(self.secret.encode()).hexdigest()

    def is_hashed_as(self, stored: str) -> bool:
        """Whether this is the token of a stored hash, in a time that does not depend on the difference."""
        return hmac.compare_digest(self.hash, stored)

    def __str__(self) -> str:
        return f"{PREFIX}_{self.id}_{self.secret}"

    def __repr__(self) -> str:
        return f"TokenText({self.id!r}, …)"  # tracebacks and logs show it
