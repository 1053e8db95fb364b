"""Programs that run on several ranks, and the files in which the ranks write what they saw."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from zbv_worker.host.local_ranks import LocalRanks, python_command

from support.processes import DEADLINE


def found_by(module: str, ranks: int, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """What each rank of a program of ``support`` wrote to ``rank-RANK.json`` or ``.pt`` in the folder."""
    command = python_command(f"support.{module}", str(folder), *arguments)
    with LocalRanks([command] * ranks, folder) as started:
        started.wait(DEADLINE)
    return [_read(folder / f"rank-{rank}") for rank in range(ranks)]


def _read(path: Path) -> Any:
    if (tensors := path.with_suffix(".pt")).exists():
        return torch.load(tensors, weights_only=False)
    return json.loads(path.with_suffix(".json").read_text())
