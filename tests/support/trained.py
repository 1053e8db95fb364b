"""Trains plans with ranks as threads, and the same model in one process, to compare what comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import identity
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.writing import problem_json
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.model.protocol import Scheduled, Weighted
from zbv_worker.model.spec import ModelSpec
from zbv_worker.run.options import RunOptions, TrainingOptions
from zbv_worker.run.run import train
from zbv_worker.tracing.report import RankReport

from support.selfcheck import HardModel
from support.thread_transport import ThreadHub, ThreadTransport

CPU = torch.device("cpu")
SPEC = ModelSpec("tests:model")


class Remembering(HardModel):
    """A model that keeps the modules that were built from it."""

    def __init__(self, seed: int = 0, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD):
        super().__init__(seed)
        self.built: list[nn.Module] = []
        self._optimizer = optimizer

    def build_layers(self, names: Sequence[str], device: torch.device) -> nn.Sequential:
        self.built.append(module := super().build_layers(names, device))
        return module

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return self._optimizer(parameters, lr=0.05)  # type: ignore[call-arg]  # every optimizer used here has it

    @property
    def parameters(self) -> dict[str, Tensor]:
        return {n: p.detach() for module in self.built for n, p in module.named_parameters()}


@dataclass
class Trained:
    """What came out: parameters by name, one entry per replica, and the reports by global rank."""

    parameters: list[dict[str, Tensor]]
    reports: list[RankReport]

    @property
    def losses(self) -> list[float]:
        for report in self.reports:
            if report.lines[-1].loss is not None:
                return [line.loss for line in report.lines if line.loss is not None]
        raise AssertionError("no rank has losses")


def train_in_threads(
    problem: Problem,
    orders: Orders,
    options: TrainingOptions,
    steps: int,
    model: Callable[..., Any] = Remembering,
    spec: Any = SPEC,
    **arguments: Any,
) -> Trained:
    """Train a plan, every rank of every replica a thread; ``spec`` only names the model."""
    hub = ThreadHub(problem.pp_degree, options.replicas)
    plan_id = identity(problem_json(problem), orders.all_text())
    models = [model(**arguments) for _ in range(hub.layout.world_size)]
    run_options = RunOptions((), spec, steps, timeout=60.0, training=options)

    def report_of(transport: ThreadTransport) -> RankReport:
        plan = RankPlan.of(plan_id, problem, orders, transport.pp_rank)
        (report,) = train(run_options, [plan], models[transport.rank], transport, CPU)
        return report

    reports = hub.run(report_of)
    layout = hub.layout
    parameters: list[dict[str, Tensor]] = []
    for replica in range(layout.replicas):
        ranks = [layout.global_rank(pp_rank, replica) for pp_rank in range(layout.pp_degree)]
        parameters.append({n: p for rank in ranks for n, p in _remembered(models[rank]).items()})
    return Trained(parameters, reports)


def train_alone(
    microbatches: int,
    steps: int,
    *,
    clip_norm: float | None = None,
    model: type[Remembering] = Remembering,
    **arguments: Any,
) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """The same in one process, by plain autograd: parameters, losses and gradient norms.

    A model with ``loss_sum`` has the mean over the weights of a whole step.
    """
    built = model(**arguments)
    module = built.build_stage(0, 1, CPU).train()
    optimizer = built.optimizer(p for p in module.parameters() if p.requires_grad)
    schedule = built.schedule(optimizer) if isinstance(built, Scheduled) else None
    losses, norms = [], []
    for step in range(steps):
        batch = [built.microbatch(step, index) for index in range(microbatches)]
        pairs: list[tuple[Tensor, Any]]
        if isinstance(built, Weighted):
            pairs = [built.loss_sum(module(input), target) for input, target in batch]
        else:
            pairs = [(built.loss(module(input), target), 1) for input, target in batch]
        loss = torch.stack([part for part, _ in pairs]).sum() / sum(weight for _, weight in pairs)
        torch.autograd.backward(loss)
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), clip_norm or float("inf"))
        norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
        losses.append(float(loss.detach()))
    return built.parameters, losses, norms


def _remembered(model: object) -> dict[str, Tensor]:
    return model.parameters if isinstance(model, Remembering) else {}
