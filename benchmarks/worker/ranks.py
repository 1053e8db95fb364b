"""Starts the ranks of a comparison on this machine and collects their answers.

A rank is ``python -m benchmarks.worker.rank NAME REQUEST`` with torchrun's environment: one core and one
compute thread. It calls the function ``on_rank`` of the comparison's module.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zbv_worker.host.local_ranks import LocalRanks, python_command

if TYPE_CHECKING:
    from zbv_worker.transport.distributed import DistributedTransport
    from zbv_worker.transport.world import World

MEETING_SECONDS = 120.0
"""Timeout for the rendezvous, and for one tensor."""

_LONGEST_SECONDS = 3600.0


def on_ranks(name: str, request: Mapping[str, Any], ranks: int) -> list[Any]:
    """Run ``on_rank`` on every rank; returns their results by rank.

    Parameters
    ----------
    name
        A module of :mod:`benchmarks.worker`.
    request
        Arguments of ``on_rank``, as JSON values.

    Raises
    ------
    LaunchError
        If a rank fails, with the end of its log.
    """
    with tempfile.TemporaryDirectory(prefix="zbv-bench-") as folder_name:
        folder = Path(folder_name)
        path = folder / "request.json"
        path.write_text(json.dumps(request))
        command = python_command("benchmarks.worker.rank", name, str(path))
        with LocalRanks([command] * ranks, folder) as started:
            started.wait(_LONGEST_SECONDS)
        return [json.loads(answer_path(path, rank).read_text()) for rank in range(ranks)]


def answer_path(request: Path, rank: int) -> Path:
    """The file for a rank's answer."""
    return request.with_name(f"answer-{rank}.json")


@contextmanager
def meeting(world: World) -> Iterator[DistributedTransport]:
    """A gloo transport between the ranks. It closes only after all ranks have received everything."""
    import torch
    from zbv_worker.transport.distributed import DistributedTransport

    transport = DistributedTransport(world, "gloo", torch.device("cpu"), MEETING_SECONDS)
    try:
        yield transport
        transport.flush(MEETING_SECONDS)
        transport.barrier(MEETING_SECONDS)
    finally:
        transport.close()
