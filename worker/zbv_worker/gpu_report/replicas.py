"""The check of data-parallel replicas: gradients that they sum, with whole and with divided parameters.

Two replicas of a V train one step as in ``zbv-worker run --data-parallel 2``, then one with ``--shard``. The
sums run while other stages compute, and gathered parameters are freed within the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from zbv_solver.plans.channels import channels
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.stages import Placement

from zbv_worker.execution.build_stages import build_stages
from zbv_worker.execution.executor import Executor, ExecutorOptions
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.gpu_report.check import Answers, Line, Place, ReportOptions, at_most, largest
from zbv_worker.gpu_report.pipeline import GRADIENT_TOLERANCE
from zbv_worker.gpu_report.rank import (
    GradientsByName,
    error_of_all,
    gradients_of,
    reference_gradients,
    v_orders,
)
from zbv_worker.measure.ranks import connected, equal_stages
from zbv_worker.stage.dtensors import is_dtensor
from zbv_worker.training.gradients import SummedGradients
from zbv_worker.training.replicas import DataOfReplica
from zbv_worker.training.sharding import dividing
from zbv_worker.transport.channels import key_of
from zbv_worker.transport.connected import ConnectedTransport
from zbv_worker.transport.world import Backend

REPLICAS = 2
_STEPS = 2
"""The second step gathers and sums in memory that the first has used."""


def ranks_for_gpus(options: ReportOptions) -> int:
    """The ranks of all replicas that have a GPU each, at most those of the report's number of stages."""
    pipelines = min(options.ranks, torch.cuda.device_count() // REPLICAS)
    return REPLICAS * max(pipelines, 1)


def measure_replicas(place: Place, backend: Backend) -> dict[str, Any]:
    """Train as one rank of one replica; returns the errors of the gradients as JSON."""
    with connected(place.world, backend, place.device, place.options.timeout, REPLICAS) as transport:
        problem = equal_stages(Placement.of("v", transport.layout.pp_degree), place.options.microbatches)
        orders = v_orders(problem)
        keys = [key_of(channel) for channel in channels(problem, orders)]
        transport.open(keys, place.options.timeout)
        found = [_error(place, transport, problem, orders, is_sharded=which) for which in (False, True)]
        return {"backend": backend, "summed": found[0], "sharded": found[1]}


def _error(
    place: Place, transport: ConnectedTransport, problem: Problem, orders: Orders, *, is_sharded: bool
) -> float | None:
    """Train; returns the relative error of the gradients against one process, None if it is not finite."""
    options, device, timeout = place.options, place.device, place.options.timeout
    model = options.model.build()
    plan = RankPlan.of("gpu-report", problem, orders, transport.pp_rank)
    divide = dividing(transport, device) if is_sharded else None
    stages = build_stages(model, plan, device, replicas=REPLICAS, divide=divide)
    reference = reference_gradients(model, REPLICAS * options.microbatches, device)
    gradients = SummedGradients({index: stage.module for index, stage in stages.items()}, transport)
    executor = Executor(
        plan,
        stages,
        DataOfReplica(model, plan.microbatches, transport.replica),
        transport,
        device=device,
        timeout=timeout,
        options=ExecutorOptions(on_stage_done=gradients.stage_done),
    )
    for _ in range(_STEPS):
        gradients.begin()
        launched = executor.launch(0)
        gradients.finish(timeout)
        launched.result()
    gradients.hand_over()
    executor.close()
    modules = [stage.module for stage in stages.values()]
    found = _completed(modules, reference, transport.replica) if is_sharded else gradients_of(modules)
    error = error_of_all(found, reference, transport, timeout)
    return error if math.isfinite(error) else None  # JSON has no infinity


def _completed(modules: Iterable[nn.Module], reference: GradientsByName, replica: int) -> GradientsByName:
    """This replica's rows of each gradient, with the reference's elsewhere: other ranks compare those."""
    found = {}
    for name, parameter in (pair for module in modules for pair in module.named_parameters()):
        if is_dtensor(parameter.grad):
            rows, right = parameter.grad.to_local().cpu(), reference[name]
            first = replica * math.ceil(right.shape[0] / REPLICAS)
            found[name] = torch.cat([right[:first], rows, right[first + len(rows) :]])
    return found


def judge_replicas(options: ReportOptions, answers: Answers) -> Iterator[Line]:
    """The lines of :func:`measure_replicas`."""
    pipelines, backend = len(answers) // REPLICAS, answers[0]["backend"]
    for kind, how in (("summed", "summed"), ("sharded", "divided by --shard")):
        errors = [answer[kind] for answer in answers]
        yield at_most(
            f"gradients of {REPLICAS} replicas of {pipelines} ranks over {backend}, {how}, against one "
            f"process: relative error",
            largest(math.inf if error is None else error for error in errors),
            GRADIENT_TOLERANCE,
        )
