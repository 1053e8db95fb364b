"""Ranks of which one misses a collective; the others write their error to a file."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from zbv_worker.transport.connect import connect
from zbv_worker.transport.world import Layout, World

TIMEOUT = 5.0


def main(what: str, late: int, folder: Path) -> None:
    world = World.from_environment()
    replicas = world.world_size if what == "replicas" else 1
    transport = connect(world, "gloo", torch.device("cpu"), 60.0, Layout.of_world(world.world_size, replicas))
    transport.barrier(60.0)  # from here on, only the late rank is late
    files = {rank: folder / f"said-{rank}" for rank in range(world.world_size)}
    if world.rank == late:
        _wait_for(path for rank, path in files.items() if rank != late)
    else:
        try:
            if what == "barrier":
                transport.barrier(TIMEOUT)
            elif what == "ranks":
                transport.sum_over_ranks(torch.ones(1), TIMEOUT)
            else:
                transport.sum_over_replicas(torch.ones(1)).wait(TIMEOUT)
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
