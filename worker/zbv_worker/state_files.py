"""Small JSON files by which the agent, its launcher and its ranks tell each other how things stand."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

SPEC = "spec.json"
"""What to run, for the launcher and the ranks."""
OUTCOME = "outcome.json"
"""How the ranks ended, from the launcher."""


def place_file(folder: Path, rank: int) -> Path:
    """Where a rank says where it is."""
    return folder / f"place-{rank}.json"


def failure_file(folder: Path, rank: int) -> Path:
    """Where a rank says why it ended."""
    return folder / f"failure-{rank}.json"


def write_json(path: Path | str, document: Any) -> None:
    """Replace a file as a whole: readers see the old one or the new one."""
    part = f"{path}.part"
    Path(part).write_text(json.dumps(document), encoding="utf-8")
    os.replace(part, path)


def read_json(path: Path) -> Any:
    """A file's content, None when there is no such file or it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
