"""Programs that run on several ranks, and the files in which the ranks write what they saw."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zbv_worker.host.local_ranks import LocalRanks, python_command

from support.processes import DEADLINE


def found_by(module: str, ranks: int, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """What each rank of a program of ``support`` has written to ``rank-RANK.json`` in the folder."""
    command = python_command(f"support.{module}", str(folder), *arguments)
    with LocalRanks([command] * ranks, folder) as started:
        started.wait(DEADLINE)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
