"""Ranks of which one misses a collective; the others write down the error that they get."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from zbv_worker.transport.distributed import DistributedTransport
from zbv_worker.transport.world import World


def main(what: str, late: int, folder: Path) -> None:
    world = World.from_environment()
    replicas = world.world_size if what == "replicas" else 1
    transport = DistributedTransport(world, "gloo", torch.device("cpu"), 60.0, replicas)
    said = folder / f"said-{world.rank}"
    if world.rank == late:
        others = [folder / f"said-{rank}" for rank in range(world.world_size) if rank != late]
        while not all(path.exists() for path in others):
            time.sleep(0.05)
        said.write_text("")
    else:
        try:
            if what == "barrier":
                transport.barrier(1.0)
            elif what == "ranks":
                transport.sum_over_ranks(torch.ones(1), 1.0)
            else:
                transport.sum_over_replicas(torch.ones(1)).wait(1.0)
        except TimeoutError as error:
            text = str(error)
            # Rank 0 serves the store, which the others read to find the missing rank.
            time.sleep(3.0 if world.rank == 0 else 0.0)
            said.write_text(text)
    transport.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
