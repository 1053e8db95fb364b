"""One rank of a comparison: see :mod:`benchmarks.worker.ranks`."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import torch
from zbv_worker.host.cores import keep_freed_memory, pin_to_core
from zbv_worker.transport.world import World

from benchmarks.worker.ranks import answer_path


def main(name: str, request: Path) -> None:
    """Measure, and write the answer next to the request."""
    world = World.from_environment()
    torch.set_num_threads(1)
    pin_to_core(world.local_rank)
    keep_freed_memory()
    comparison = import_module(f"benchmarks.worker.{name}")
    answer = comparison.on_rank(json.loads(request.read_text()), world)
    answer_path(request, world.rank).write_text(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
