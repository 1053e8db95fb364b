"""Ranks of which one does not come to a barrier; the others write down what they are told of it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from zbv_worker.transport.distributed import DistributedTransport, World


def main(late: int, folder: Path) -> None:
    world = World.from_environment()
    transport = DistributedTransport(world, "gloo", torch.device("cpu"), 60.0)
    said = folder / f"said-{world.rank}"
    if world.rank == late:
        others = [folder / f"said-{rank}" for rank in range(world.world_size) if rank != late]
        while not all(path.exists() for path in others):
            time.sleep(0.05)
        said.write_text("")
    else:
        try:
            transport.barrier(1.0)
        except TimeoutError as error:
            text = str(error)
            # Rank 0 keeps the store, in which the others look for what it found out.
            time.sleep(3.0 if world.rank == 0 else 0.0)
            said.write_text(text)
    transport.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
