"""The JSON of signing in."""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel, Field


class SignInLink(BaseModel):
    """A link that signs one browser in."""

    url: str = Field(description="Works once.")
    expires_at: datetime
