"""One rank of a comparison: see :mod:`zbv_worker.bench.ranks`."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import torch

from zbv_worker.bench.ranks import answer_path
from zbv_worker.launch import keep_freed_memory, pin_to_core
from zbv_worker.transport.distributed import World


def main(name: str, request: Path) -> None:
    """Measure, and write the answer beside the request."""
    world = World.from_environment()
    torch.set_num_threads(1)
    pin_to_core(world.local_rank)
    keep_freed_memory()
    comparison = import_module(f"zbv_worker.bench.{name}")
    answer = comparison.on_rank(json.loads(request.read_text()), world)
    answer_path(request, world.rank).write_text(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
