"""One rank of a GPU report: profile, training steps on its device's timeline, gradients.

:func:`zbv_worker.measure.gpu_report.gpu_report.gpu_report` runs this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from zbv_solver.plans.channels import channels
from zbv_solver.plans.orders import Action, Orders
from zbv_solver.problem.placement import Placement
from zbv_solver.problem.problem import Problem

from zbv_worker.execution.build_stages import build_stages
from zbv_worker.execution.executor import Executor, StepResult
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.measure.gpu_report.gpu_report import Device, ReportOptions
from zbv_worker.measure.profile.profile import ProfileOptions, rank_json
from zbv_worker.measure.profile.rank import RankProfiler
from zbv_worker.measure.ranks import answer, connected, equal_stages, use_one_core
from zbv_worker.model.checks import build_stage
from zbv_worker.model.protocol import PipelineModel
from zbv_worker.model.spec import ModelSpec
from zbv_worker.tracing.merged_trace import RankTrace
from zbv_worker.transport.channels import Transport, key_of
from zbv_worker.transport.world import Backend, World, select_device

Gradients = dict[str, Tensor]


def placed(device: Device, world: World) -> tuple[torch.device, Backend]:
    """A rank's device and backend: its own GPU and NCCL if there are enough, else a shared GPU and gloo."""
    if device == "cpu":
        return torch.device("cpu"), "gloo"
    count = torch.cuda.device_count()
    if count >= world.world_size:
        return select_device("nccl", world.local_rank), "nccl"
    shared = torch.device("cuda", world.local_rank % count)
    torch.cuda.set_device(shared)
    return shared, "gloo"


def v_orders(problem: Problem) -> Orders:
    """A simple V plan with split backwards, so that the report needs no solver.

    In each round, every rank runs one action that is ready: I before F before W, later stages before earlier
    ones.
    """
    last = problem.n_stages - 1
    ranks: list[list[Action]] = [[] for _ in range(problem.pp_degree)]
    ready = [Action(0, "F", j) for j in range(problem.microbatches)]
    while ready:
        chosen: dict[int, Action] = {}
        for action in sorted(ready, key=_urgency):
            chosen.setdefault(problem.placement.rank_of[action.stage], action)
        for rank, action in chosen.items():
            ranks[rank].append(action)
            ready.remove(action)
            stage, letter, j = action
            if letter == "F":
                ready.append(Action(stage + 1, "F", j) if stage < last else Action(last, "I", j))
            elif letter == "I":
                ready.append(Action(stage, "W", j))
                if stage:
                    ready.append(Action(stage - 1, "I", j))
    return Orders.from_actions(ranks)


def _urgency(action: Action) -> tuple[int, int, int]:
    return "IFW".index(action.letter), -action.stage, action.microbatch


def measure(options: ReportOptions, transport: Transport, device: torch.device) -> dict[str, Any]:
    """Measure everything as one rank."""
    profiled = ProfileOptions(
        options.model,
        options.ranks,
        options.microbatches,
        repeats=options.repeats,
        timeout=options.timeout,
    )
    found = RankProfiler(profiled, transport, device).measure()
    model = options.model.build()
    result, gradients = _trained(options, model, transport, device)
    reference = reference_gradients(model, options.microbatches, device)
    return {
        "profile": rank_json(found),
        "relative_error": _error_of_all(gradients, reference, transport, options.timeout),
        "trace": RankTrace.of("gpu-report", transport.rank, [result]).document(),
    }


def _error_of_all(mine: Gradients, reference: Gradients, transport: Transport, timeout: float) -> float:
    """The largest relative error of any parameter on any rank; infinite if a parameter is missing.

    Every rank compares its own gradients, so none of them is sent.
    """
    own = {name: reference[name] for name in mine if name in reference}
    gathered = transport.gather([sorted(mine), relative_error(mine, own)], timeout)
    names = {name for found, _ in gathered for name in found}
    return max(error for _, error in gathered) if names == reference.keys() else float("inf")


def _trained(
    options: ReportOptions, model: PipelineModel, transport: Transport, device: torch.device
) -> tuple[StepResult, Gradients]:
    """Run the steps without an optimizer; returns the last step's result and gradients, on the CPU."""
    problem = equal_stages(Placement.of("v", options.ranks), options.microbatches)
    orders = v_orders(problem)
    plan = RankPlan.of("gpu-report", problem, orders, transport.rank)
    transport.open([key_of(channel) for channel in channels(problem, orders)], options.timeout)
    stages = build_stages(model, plan, device)
    modules = [stage.module for stage in stages.values()]
    executor = Executor(plan, stages, model, transport, device=device, timeout=options.timeout)
    result = executor.step(0)  # exchanges shapes; every step has the same data
    for _ in range(options.steps):
        for module in modules:
            module.zero_grad()
        transport.barrier(options.timeout)
        result = executor.step(0)
    return result, _gradients(modules)


def reference_gradients(model: PipelineModel, microbatches: int, device: torch.device) -> Gradients:
    """Gradients of plain autograd on the uncut model."""
    module = build_stage(model, 0, 1, device)
    for index in range(microbatches):
        input, target = (tensor.to(device) for tensor in model.microbatch(0, index))
        loss = model.loss(module(input), target) / microbatches
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
    return _gradients([module])


def relative_error(found: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """The largest |found - reference| / |reference| (norms) of any parameter; inf if one is missing."""
    if found.keys() != reference.keys():
        return float("inf")
    errors = (
        float((found[name] - right).norm() / right.norm().clamp_min(1e-12))
        for name, right in reference.items()
    )
    return max(errors, default=0.0)


def _gradients(modules: Iterable[nn.Module]) -> Gradients:
    return {
        name: parameter.grad.cpu()
        for module in modules
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def main(request: dict[str, Any], world: World) -> dict[str, Any]:
    """Measure as one rank; returns the measurements as JSON."""
    options = ReportOptions(**{**request, "model": ModelSpec(**request["model"])})
    device, backend = placed(options.device, world)
    if device.type == "cpu":
        use_one_core(world)
    with connected(world, backend, device, options.timeout) as transport:
        return {**measure(options, transport, device), "backend": backend}


if __name__ == "__main__":
    answer(main)
