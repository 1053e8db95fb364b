"""Measures on local ranks: starts them, and is the frame in which a rank measures.

All ranks measure at the same time, because they share caches and memory bandwidth: a stage alone on the
machine would be faster than in the pipeline.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from zbv_solver.problem.placement import Placement
from zbv_solver.problem.problem import Costs, Memory, Problem

from zbv_worker.errors import WorkerError, print_error
from zbv_worker.host.cores import keep_freed_memory, pin_to_core
from zbv_worker.host.local_ranks import LocalRanks, python_command
from zbv_worker.model.spec import ModelSpec
from zbv_worker.transport.distributed import DistributedTransport
from zbv_worker.transport.world import Backend, World

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def measure_on_ranks(module: str, options: DataclassInstance, ranks: int, timeout: float) -> list[Any]:
    """Run a module that calls :func:`answer`, in one process per rank; returns the answers by rank.

    Raises
    ------
    LaunchError
        If a rank fails, or after ``timeout`` seconds; includes the end of the rank's log.
    """
    with tempfile.TemporaryDirectory(prefix="zbv-measure-") as name:
        folder = Path(name)
        request = folder / "request.json"
        request.write_text(json.dumps(asdict(options)))
        with LocalRanks([python_command(module, str(request))] * ranks, folder) as started:
            started.wait(timeout)
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def answer(measure: Callable[[dict[str, Any], World], Any]) -> None:
    """Measure as one rank of :func:`measure_on_ranks`; ends the process if that fails.

    Parameters
    ----------
    measure
        Gets the fields of the options; returns JSON.
    """
    request = Path(sys.argv[1])
    fields = json.loads(request.read_text())
    world = World.from_environment()
    try:
        found = measure({**fields, "model": ModelSpec(**fields["model"])}, world)
    except WorkerError as error:  # a clear message, no traceback
        sys.exit(print_error(error))
    (request.parent / f"{world.rank}.json").write_text(json.dumps(found))


@contextmanager
def connected(
    world: World, backend: Backend, device: torch.device, timeout: float
) -> Iterator[DistributedTransport]:
    """A transport between the ranks, closed when all of them are done. On a CPU, a rank gets one core."""
    if device.type == "cpu":
        pin_to_core(world.local_rank)
        keep_freed_memory()
        torch.set_num_threads(1)
    transport = DistributedTransport(world, backend, device, timeout)
    try:
        yield transport
        transport.flush(timeout)
        transport.barrier(timeout)
    finally:
        transport.close()


def equal_stages(placement: Placement, microbatches: int) -> Problem:
    """A problem whose stages and transfers all cost 1, without memory."""
    ones = (1.0,) * placement.n_stages
    return Problem(placement, microbatches, Costs(ones, ones, ones, ones[1:]), Memory.unlimited(placement))
