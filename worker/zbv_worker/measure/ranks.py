"""Measures on local ranks: starts them, and is the frame in which a rank measures.

All ranks measure at the same time, because they share caches and memory bandwidth: a stage alone on the
machine would be faster than in the pipeline.
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.stages import Costs, Memory, Placement

from zbv_worker.errors import WorkerError, print_error
from zbv_worker.host.local_ranks import LocalRanks, python_command
from zbv_worker.host.process import keep_freed_memory, leave, pin_to_core
from zbv_worker.transport.connect import connect
from zbv_worker.transport.connected import ConnectedTransport
from zbv_worker.transport.world import Backend, Layout, World


def measure_on_ranks(
    command: Sequence[str],
    request: Any,
    ranks: int,
    timeout: float,
    on_poll: Callable[[LocalRanks], None] | None = None,
) -> list[Any]:
    """Run a module that calls :func:`answer`, in one process per rank; returns the answers by rank.

    Parameters
    ----------
    command
        The module and its arguments.
    request
        JSON for every rank.
    on_poll
        Called again and again while the ranks run.

    Raises
    ------
    LaunchError
        If a rank fails, or after ``timeout`` seconds; includes the end of the rank's log.
    """
    with tempfile.TemporaryDirectory(prefix="zbv-measure-") as name:
        folder = Path(name)
        path = folder / "request.json"
        path.write_text(json.dumps(request))
        with LocalRanks([python_command(*command, str(path))] * ranks, folder) as started:
            started.wait(timeout, on_poll and (lambda: on_poll(started)))
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def answer(measure: Callable[[Any, World], Any]) -> None:
    """Measure as one rank of :func:`measure_on_ranks`; ends the process if that fails.

    Parameters
    ----------
    measure
        Gets the request; returns JSON.
    """
    path = Path(sys.argv[-1])
    world = World.from_environment()
    try:
        found = measure(json.loads(path.read_text()), world)
    except WorkerError as error:  # a clear message, no traceback
        leave(print_error(error))
    except Exception:
        traceback.print_exc()
        leave(1)
    (path.parent / f"{world.rank}.json").write_text(json.dumps(found))


def use_one_core(world: World) -> None:
    """Compute on one core, with one thread, as ranks do that share a host."""
    pin_to_core(world.local_rank)
    keep_freed_memory()
    torch.set_num_threads(1)


@contextmanager
def connected(
    world: World, backend: Backend, device: torch.device, timeout: float, replicas: int = 1
) -> Iterator[ConnectedTransport]:
    """A transport between the ranks, closed after all of them have received everything."""
    layout = Layout.of_world(world.world_size, replicas)
    with connect(world, backend, device, timeout, layout) as transport:
        yield transport
        transport.flush(timeout)
        transport.barrier(timeout)


def equal_stages(placement: Placement, microbatches: int) -> Problem:
    """A problem whose stages and transfers all cost 1, without memory."""
    ones = (1.0,) * placement.n_stages
    return Problem(placement, microbatches, Costs(ones, ones, ones, ones[1:]), Memory.unlimited(placement))
