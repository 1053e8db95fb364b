"""Documents with single values replaced."""

from __future__ import annotations

import copy
from typing import Any

ABSENT = object()
"""In place of a value: the key is removed."""


def changed(document: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A copy with other values at paths such as ``costs.forward`` or ``ranks.0.3``.

    A function changes the value that is there.
    """
    made = copy.deepcopy(document)
    for path, value in changes.items():
        target: Any = made
        keys: list[Any] = [int(part) if part.isdigit() else part for part in path.split(".")]
        *parents, key = keys
        for parent in parents:
            target = target[parent] if isinstance(target, list) else target.setdefault(parent, {})
        if value is ABSENT:
            del target[key]
        else:
            target[key] = value(target[key]) if callable(value) else value
    return made
