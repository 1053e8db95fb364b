"""Types of the numbers in a configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Size = Annotated[int, Field(strict=True, ge=1, le=100_000_000)]
Count = Annotated[int, Field(strict=True, ge=0, le=100_000_000)]
Total = Annotated[int, Field(strict=True, ge=0, le=10**12)]
Flag = Annotated[bool, Field(strict=True)]
Amount = Annotated[float, Field(strict=True, ge=0, le=1e15, allow_inf_nan=False)]
Rate = Annotated[float, Field(strict=True, gt=0, le=1e9, allow_inf_nan=False)]
Share = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]


class ConfigSection(BaseModel):
    """A section of a configuration: frozen, and without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)
