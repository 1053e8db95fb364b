"""JSON text: how zbv reads and writes it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

_MOST_DIGITS = 100
"""Longer integers are read as floats: no field accepts a number that large."""


def canonical_json(document: Any) -> str:
    """The text of a document that hashes are computed from: sorted keys, no white space, UTF-8."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def decode_json(text: str) -> Any:
    """Parse JSON text.

    A number that no float can hold becomes inf, even an integer of thousands of digits, which Python itself
    refuses to parse. The document's validation can then name the offending field.

    Raises :class:`json.JSONDecodeError` when the text is not JSON.
    """
    return json.loads(text, parse_int=_integer)


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MOST_DIGITS else float(digits)


def plain(value: Any) -> Any:
    """A dataclass as JSON values: its fields in their order, sequences as lists, infinity as null.

    Whole numbers have no fraction (:func:`number`). Callers of the library may give any sequence of any
    numbers, such as a list or a NumPy array: the text, and a plan's identity with it, stays the same.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Iterable):
        return [plain(each) for each in value]
    return number(value) if math.isfinite(value) else None


def number(value: float) -> float | int:
    """A float in its shortest JSON form: whole numbers without a fraction."""
    return int(value) if value == int(value) else value


def numbers(values: Sequence[float]) -> list[float | int]:
    """Apply :func:`number` to a sequence."""
    return [number(value) for value in values]
