"""The example problem of the front page."""

from __future__ import annotations

import json
from typing import Any

EXAMPLE: dict[str, Any] = {
    "pp_degree": 4,
    "microbatches": 16,
    "costs": {"forward": 1000, "backward_input": 1100, "backward_weight": 700, "p2p": 50},
    "memory": {"forward": 2, "backward_input": -1, "backward_weight": -1, "limit": 16},
    "units": {"time": "us"},
}
"""Four ranks, an uneven backward, and the memory of 1F1B."""


def example_text() -> str:
    """The example as the body of a request: readable JSON, one line per member."""
    members = ",\n    ".join(f'"{name}": {json.dumps(value)}' for name, value in EXAMPLE.items())
    return f'{{"problem": {{\n    {members}}}}}'
