"""Reading server-sent events in tests."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Told:
    """One event of a stream."""

    id: int
    kind: str
    data: dict[str, Any]


def events_of(text: str) -> list[Told]:
    """The events of a stream that has ended, without comments."""
    found = []
    for block in text.split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        fields = dict(line.split(": ", 1) for line in lines)
        if "data" in fields:
            found.append(Told(int(fields["id"]), fields["event"], json.loads(fields["data"])))
    return found
