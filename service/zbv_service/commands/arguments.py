"""Flags, and types of arguments for argparse, which adds the flag's name to their messages."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from math import isfinite
from typing import Any


def flag_of(name: str) -> str:
    """The flag for a setting or an option of the API: ``--time-limit`` for ``time_limit``."""
    return "--" + name.replace("_", "-")


def finite(text: str) -> float:
    """A number that is neither infinite nor NaN."""
    try:
        found = float(text)
    except ValueError:
        found = float("nan")
    if not isfinite(found):
        raise ArgumentTypeError(f"found {text!r}; must be a finite number.")
    return found


def at_least_one(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"found {text!r}; must be a whole number of at least 1.")
    return int(text)


def json_object(text: str) -> dict[str, Any]:
    """A JSON object without NaN or infinite numbers."""
    try:
        found = json.loads(text)
        json.dumps(found, allow_nan=False)
    except ValueError as error:
        raise ArgumentTypeError(f"found {text!r}, which is not JSON ({error}); {_EXAMPLE}") from None
    if not isinstance(found, dict):
        raise ArgumentTypeError(f"found {text!r}; {_EXAMPLE}")
    return found


_EXAMPLE = "must be a JSON object such as '{\"layers\": 8}'."
