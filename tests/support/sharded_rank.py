"""A rank that trains models with and without sharding and writes down the parameters.

A program of :mod:`support.rank_files` for four ranks: two replicas of a V.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import Problem
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.gradients.buckets import gradients_of
from zbv_worker.gradients.fully_sharded import dividing
from zbv_worker.model.spec import ModelSpec
from zbv_worker.models.gpt import GPT, GptConfig
from zbv_worker.run.options import RunOptions, TrainingOptions
from zbv_worker.run.run import train
from zbv_worker.transport.gloo import GlooTransport
from zbv_worker.transport.gloo_control import GlooControl
from zbv_worker.transport.world import Layout, World

from support.cut_models import cut_problem
from support.orders import copied_at_random
from support.selfcheck import random_orders
from support.trained import Remembering

TIMEOUT = 60.0
CPU = torch.device("cpu")
RECOMPUTED = (True, False, True, False)


class Small(GPT):
    """A GPT of four blocks, with plain SGD: Adam would magnify differences of rounding."""

    def __init__(self, *, tied: bool = False, dtype: torch.dtype = torch.float32):
        super().__init__(GptConfig(4, 16, 2, 8, 2, 20_000, tied=tied), 0)
        self._dtype = dtype
        self.built: list[nn.Module] = []

    def build_layers(self, names: Sequence[str], device: torch.device) -> nn.Sequential:
        self.built.append(module := super().build_layers(names, device).to(self._dtype))
        return module

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)


class Tempered(Small):
    """With a loss that has a parameter, in a module that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.loss_module = nn.ParameterList([torch.ones(3)])

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return super().loss(output * self.loss_module[0].mean(), target)


@dataclass(frozen=True)
class Case:
    """A model and how to train it."""

    model: Callable[[], Any]
    problem: Problem
    options: dict[str, Any]
    is_copied: bool = False
    """Whether some of what F's keep is copied to the host."""

    @property
    def orders(self) -> Orders:
        orders = random_orders(self.problem, Random(7), 0.3)
        return copied_at_random(orders, Random(7)) if self.is_copied else orders


def _gpt(**cut: Any) -> Problem:
    return cut_problem(Small().layer_names(), (2, 1, 1, 2), **cut)


CASES = {
    "uneven": Case(Remembering, cut_problem(Remembering().layer_names(), (3, 2, 1, 2)), {}),
    "recomputed, mixed, accumulated": Case(
        Small,
        _gpt(recompute=RECOMPUTED),
        {"evaluate_every": 1, "precision": "bfloat16", "parts": 2},
        is_copied=True,
    ),
    "tied": Case(lambda: Small(tied=True), _gpt(), {}, is_copied=True),
    "tied over ranks": Case(
        lambda: Small(tied=True), cut_problem(Small().layer_names(), (3, 3), placement="single"), {}
    ),
    "half": Case(lambda: Small(dtype=torch.bfloat16), _gpt(), {}),
    "clipped": Case(Tempered, _gpt(), {"clip_norm": 0.1}),
}


def trained(case: Case, transport: GlooTransport, *, is_sharded: bool, steps: int = 2) -> dict[str, Any]:
    """The parameters by name, and the losses and norms of the steps."""
    plan = RankPlan.of("0" * 64, case.problem, case.orders, transport.pp_rank)
    options = TrainingOptions(replicas=2, is_sharded=is_sharded, **case.options)
    model = case.model()
    run = RunOptions((), ModelSpec("tests:model"), steps, timeout=TIMEOUT, training=options)
    (report,) = train(run, [plan], model, transport, CPU)
    named = [pair for module in model.built for pair in module.named_parameters()]
    return {
        "parameters": {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in named},
        "kept": {n: p.to_local().numel() if isinstance(p, DTensor) else p.numel() for n, p in named},
        "losses": [line.loss for line in report.lines],
        "norms": [line.updated.gradient_norm for line in report.lines],
        "evaluations": report.evaluations,
    }


def sum_of_halves(transport: GlooTransport) -> float:
    """The sum over two replicas of gradients 256, 1, 1 and 1, of a parameter in bfloat16."""
    module = nn.Sequential(nn.Linear(1, 1, bias=False, dtype=torch.bfloat16))
    dividing(transport, CPU)(module)
    gradients = gradients_of({0: module}, transport)
    gradients.begin()
    for x in (256.0, 1.0, 1.0, 1.0):
        module(torch.tensor([[x]], dtype=torch.bfloat16)).sum().backward()
    gradients.stage_done(0)
    gradients.finish(TIMEOUT)
    gradients.hand_over()
    gradient = module[0].weight.grad
    assert isinstance(gradient, DTensor)
    return float(gradient.full_tensor())


def found(folder: Path) -> dict[str, Any]:
    """What this rank saw, by case."""
    control = GlooControl(World.from_environment(), TIMEOUT, Layout.of_world(4, 2))
    transport = GlooTransport(control, CPU, TIMEOUT)
    found: dict[str, Any] = {
        name: {is_sharded: trained(case, transport, is_sharded=is_sharded) for is_sharded in (False, True)}
        for name, case in CASES.items()
    }
    found["sum of halves"] = sum_of_halves(transport)
    transport.barrier(TIMEOUT)
    transport.close()
    return found
