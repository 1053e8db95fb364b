"""Programs that run on several ranks: each rank writes what it saw to a file.

A program is a module with a function ``of_rank``, which gets a folder and further arguments. A rank is
``python -m support.rank_files MODULE FOLDER ARGUMENT …`` under torchrun's environment.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from zbv_worker.host.local_ranks import LocalRanks, python_command

from support.processes import DEADLINE


def found_by(module: str, ranks: int, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """What each rank of a program saw."""
    command = python_command("support.rank_files", module, str(folder), *arguments)
    with LocalRanks([command] * ranks, folder) as started:
        started.wait(DEADLINE)
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(ranks)]


def main(module: str, folder: Path, *arguments: str) -> None:
    torch.set_num_threads(1)
    found = import_module(module).of_rank(folder, *arguments)
    torch.save(found, folder / f"rank-{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
