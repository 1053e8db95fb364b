"""Ranks of a comparison on this machine: starts them, and is what each of them runs.

A rank is ``python -m benchmarks.worker.ranks NAME REQUEST`` with torchrun's environment: one core and one
compute thread. It calls the function ``on_rank`` of the comparison's module.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import nn
from zbv_worker.measure.ranks import answer, connected, measure_on_ranks, use_one_core
from zbv_worker.transport.connected import ConnectedTransport
from zbv_worker.transport.world import World

if TYPE_CHECKING:
    from zbv_solver.plans.plan import Plan
    from zbv_worker.execution.binding import Batches
    from zbv_worker.execution.executor import Executor
    from zbv_worker.execution.plan_source import WholePlan


class Workload(BaseModel):
    """What a comparison runs: defaults, which a JSON file may override."""

    model_config = ConfigDict(extra="forbid", frozen=True)


MEETING_SECONDS = 120.0
"""Timeout for the rendezvous, and for one tensor."""
_LONGEST_SECONDS = 3600.0
_CPU = torch.device("cpu")


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
    return measure_on_ranks(["benchmarks.worker.ranks", name], request, ranks, _LONGEST_SECONDS)


def plan_of(p: int, microbatches: int) -> Plan:
    """A V plan of equal stages in the memory of 1F1B."""
    from zbv_solver.problem.reading import parse_problem
    from zbv_solver.search.options import SearchOptions
    from zbv_solver.search.run import search

    letters = ("forward", "backward_input", "backward_weight")
    memory = {**dict(zip(letters, (2, -1, -1), strict=True)), "limit": 4 * p}
    document = {"pp_degree": p, "microbatches": microbatches, "costs": dict.fromkeys(letters, 1)}
    return search(parse_problem({**document, "memory": memory}), SearchOptions(effort="quick"))


def meeting(world: World) -> AbstractContextManager[ConnectedTransport]:
    """A gloo transport between the ranks. It closes only after all ranks have received everything."""
    return connected(world, "gloo", _CPU, MEETING_SECONDS)


def bare_executor(
    model: Any, plan: WholePlan, transport: ConnectedTransport, data: Batches
) -> tuple[Executor, list[nn.Module]]:
    """The executor of a rank, which only walks its list, and the modules of its stages; collective."""
    from zbv_solver.plans.channels import channels
    from zbv_worker.execution.build_stages import build_stages
    from zbv_worker.execution.executor import Executor
    from zbv_worker.transport.channels import key_of

    transport.open([key_of(channel) for channel in channels(plan.problem, plan.orders)], MEETING_SECONDS)
    mine = plan.of_rank(transport.rank)
    stages = build_stages(model, mine, _CPU)
    executor = Executor(mine, stages, data, transport, device=_CPU, timeout=MEETING_SECONDS)
    return executor, [stage.module for stage in stages.values()]


def _main(request: dict[str, Any], world: World) -> Any:
    use_one_core(world)
    return import_module(f"benchmarks.worker.{sys.argv[1]}").on_rank(request, world)


if __name__ == "__main__":
    answer(_main)
