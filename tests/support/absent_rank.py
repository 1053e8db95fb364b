"""Ranks of which one misses a collective, for every collective; the others return their errors.

A program of :mod:`support.rank_files` for three ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import torch
from zbv_worker.transport.connect import connect
from zbv_worker.transport.world import Layout, World

TIMEOUT = 2.0
LATE = {"barrier": 2, "ranks": 1, "replicas": 2}
"""The rank that is late, by collective."""


def error_of(what: str, late: int, folder: Path) -> str:
    """What a rank's collective raises; the late one waits until the others have raised it."""
    world = World.from_environment()
    replicas = world.world_size if what == "replicas" else 1
    transport = connect(world, "gloo", torch.device("cpu"), 60.0, Layout.of_world(world.world_size, replicas))
    transport.barrier(60.0)  # from here on, only the late rank is late
    files = {rank: folder / f"{what}-{rank}" for rank in range(world.world_size)}
    said = ""
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
            said = str(error)
        if world.rank == 0:  # it serves the store, in which the others look for the missing rank
            _wait_for(path for rank, path in files.items() if rank not in (0, late))
        files[world.rank].touch()
    transport.close()
    return said


def _wait_for(paths: Iterable[Path]) -> None:
    for path in paths:
        while not path.exists():
            time.sleep(0.02)


def found(folder: Path) -> dict[str, str]:
    """What every collective raises on this rank."""
    return {what: error_of(what, late, folder) for what, late in LATE.items()}
