"""Families of published models: a file for each, which says what its types have that Llama has not.

Not for formulas, and not for reading keys that several families have. A new family is a new file here, with
any of ``TEXT`` (language models), ``VISION`` (vision encoders) and ``WRAPPERS`` (both): records by the name
that a ``config.json`` has as ``model_type``. The sources are the modeling files of transformers 5, unless
a file names others.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from zbv_models.estimate.transformers_kinds import TextKind, VisionKind, Wrapper


def _registered(kind: str) -> dict[str, Any]:
    """The records of all files, by type."""
    found: dict[str, Any] = {}
    for module in sorted(each.name for each in iter_modules(__path__)):
        found |= getattr(import_module(f"{__name__}.{module}"), kind, {})
    return found


TEXT_KINDS: Mapping[str, TextKind] = _registered("TEXT")
VISION_KINDS: Mapping[str, VisionKind] = _registered("VISION")
WRAPPERS: Mapping[str, Wrapper] = _registered("WRAPPERS")
