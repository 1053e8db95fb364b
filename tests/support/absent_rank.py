"""Ranks of which one misses a collective; the others write their error to a file."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from zbv_worker.transport.connect import connect
from zbv_worker.transport.world import Layout, World


def main(what: str, late: int, folder: Path) -> None:
    world = World.from_environment()
    replicas = world.world_size if what == "replicas" else 1
    transport = connect(world, "gloo", torch.device("cpu"), 60.0, Layout.of_world(world.world_size, replicas))
    files = {rank: folder / f"said-{rank}" for rank in range(world.world_size)}
    if world.rank == late:
        _wait_for(path for rank, path in files.items() if rank != late)
    else:
        try:
            if what == "barrier":
                transport.barrier(1.0)
            elif what == "ranks":
                transport.sum_over_ranks(torch.ones(1), 1.0)
            else:
                transport.sum_over_replicas(torch.ones(1)).wait(1.0)
        except TimeoutError as error:
            if world.rank == 0:  # it serves the store, in which the others look for the missing rank
                _wait_for(path for rank, path in files.items() if rank not in (0, late))
            files[world.rank].write_text(str(error))
    transport.close()


def _wait_for(paths: Iterable[Path]) -> None:
    for path in paths:
        while not path.exists():
            time.sleep(0.02)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
