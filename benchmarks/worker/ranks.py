"""Starts the ranks of a comparison on this machine and collects their answers.

A rank is ``python -m benchmarks.worker.rank NAME REQUEST`` with torchrun's environment: one core and one
compute thread. It calls the function ``on_rank`` of the comparison's module.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from zbv_worker.measure.ranks import connected, measure_on_ranks
from zbv_worker.transport.connected import ConnectedTransport
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
    return measure_on_ranks(["benchmarks.worker.rank", name], request, ranks, _LONGEST_SECONDS)


def meeting(world: World) -> AbstractContextManager[ConnectedTransport]:
    """A gloo transport between the ranks. It closes only after all ranks have received everything."""
    return connected(world, "gloo", torch.device("cpu"), MEETING_SECONDS)
