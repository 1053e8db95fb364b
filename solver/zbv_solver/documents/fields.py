"""Field types that the documents of problems, plans, traces and HTTP bodies share.

All of them are strict: no number is read from a string, and no unknown key is accepted. Validating a wrong
document takes time and memory in proportion to its size, not to its number of mistakes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from zbv_solver.errors import MOST_ISSUES

MAX_NAME = 200
"""Most characters of a name."""
MAX_TEXT = 2000
"""Most characters of a free text."""
MOST_UNKNOWN_KEYS = MOST_ISSUES
BATCH = 1000
"""Entries of a list that are validated together. Validation stops after the first batch with a mistake."""
TOO_MANY = "too_many"
"""Pydantic error type of messages that already quote the value."""


@dataclass(frozen=True)
class AtMost:
    """Annotates a list, or a tuple that is read from one, with its maximum length.

    Pydantic validates every entry before it checks the length, and keeps every mistake. This validator checks
    the length first and validates in batches, so that a wrong document stays cheap.
    """

    length: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {**handler(schema), "maxItems": self.length}

    def _check(self, values: Any, check: Callable[[Any], Any]) -> Any:
        if not isinstance(values, list):
            return check(values)
        if len(values) > self.length:
            raise PydanticCustomError(
                TOO_MANY,
                "found {found} entries; must be at most {most}",
                {"found": len(values), "most": self.length},
            )
        checked = check(values[:BATCH])
        for first in range(BATCH, len(values), BATCH):
            try:
                checked += check(values[first : first + BATCH])
            except ValidationError:
                return check(values[: first + BATCH])  # raises again, with indices into the whole list
        return checked


Number = Annotated[float, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=1, le=10**15)]
Flag = Annotated[bool, Field(strict=True)]
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]


class Document(BaseModel):
    """A JSON object without unknown keys."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _has_few_unknown_keys(cls, value: Any) -> Any:
        return _few_keys(value, len(cls.model_fields))


class Record:
    """A dataclass that is its own document: pydantic reads it from a JSON object without unknown keys.

    Pydantic checks the types of what it reads. It checks nothing when code builds the dataclass.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def check(value: Any) -> Any:
            return _few_keys(value, len(cls.__dataclass_fields__))  # type: ignore[attr-defined]

        return core_schema.no_info_before_validator_function(check, handler(source))


def _few_keys(value: Any, known: int) -> Any:
    """The value, unless it is an object with so many keys that to report every unknown one is expensive."""
    if isinstance(value, dict) and len(value) > known + MOST_UNKNOWN_KEYS:
        raise PydanticCustomError(
            TOO_MANY,
            "found {found} keys; this object has at most {most}, and no others are allowed",
            {"found": len(value), "most": known},
        )
    return value
