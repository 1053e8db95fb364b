"""Checks that plans compute right gradients: any plan, on any ranks, against one process.

Threads or processes run a plan with a small model made of everything that is hard for a split backward
(layers used twice, tied, frozen, without bias, with parameters that are not queued), and the gradients are
compared, parameter by parameter, with those of plain autograd on the whole model.

As a program of :mod:`support.rank_files` it runs the plan files of a folder one after the other over real
transports. Plans whose names begin with "nested" run a model of nested values.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn
from zbv_solver.plans.orders import Action, Orders
from zbv_solver.problem.problem import Problem
from zbv_worker.execution.build_stages import build_stages
from zbv_worker.execution.executor import Executor, ExecutorOptions
from zbv_worker.execution.plan_source import PlanSource
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.execution.timeline import StepResult
from zbv_worker.model.protocol import PipelineModel
from zbv_worker.transport.channels import ChannelKey, Transport, key_of
from zbv_worker.transport.connect import connect
from zbv_worker.transport.world import World

from support.gradients import gradients_of
from support.nested_model import LAYERS, EightLayers, NestedModel
from support.thread_transport import ThreadHub

Gradients = dict[str, Tensor]

_CPU = torch.device("cpu")
_WIDTH, _WORDS = 12, 17
TIMEOUT = 60.0


class HardModel(EightLayers):
    """Layers that together hold every case the split backward must get right."""

    def made(self, at: int) -> nn.Module:
        if at == 0:
            return nn.Embedding(_WORDS, _WIDTH, padding_idx=3)
        if at == LAYERS - 1:
            return nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _WORDS, bias=False))
        return HardLayer(frozen=at == 4)

    def microbatch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        """Words (2, 5) and a target of the output's shape."""
        generator = torch.Generator().manual_seed(1000 * self._seed + 100 * step + index)
        words = torch.randint(_WORDS, (2, 5), generator=generator)
        return words, torch.randn(2, 5, _WORDS, generator=generator)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nnf.mse_loss(output, target)


class HardLayer(nn.Module):
    """A residual layer with a Linear used twice, a tied one, an own parameter, a norm and a convolution."""

    def __init__(self, frozen: bool):
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.twice = nn.Linear(_WIDTH, _WIDTH)
        self.tied = nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.tied.weight = self.twice.weight
        self.plain = nn.Linear(_WIDTH, _WIDTH)
        self.convolution = nn.Conv1d(_WIDTH, _WIDTH, 1)
        self.scale = nn.Parameter(torch.ones(_WIDTH))
        if frozen:
            self.plain.weight.requires_grad_(False)
            self.convolution.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.twice(self.norm(x)))
        hidden = torch.tanh(self.twice(hidden)) + self.tied(hidden) * self.scale
        hidden = self.convolution(hidden.transpose(1, 2)).transpose(1, 2)
        output: Tensor = x + self.plain(hidden)
        return output


def hard_model(*, seed: int = 0) -> HardModel:
    return HardModel(seed)


def random_orders(problem: Problem, random: Random, fused: float = 0.3) -> Orders:
    """A random valid order: any action whose inputs exist may come next, on any rank.

    So microbatches overtake each other and W's come at any time after their I. ``fused`` is the share of
    backwards that are B.
    """
    last = problem.n_stages - 1
    ranks: list[list[Action]] = [[] for _ in range(problem.pp_degree)]
    ready = [Action(0, "F", j) for j in range(problem.microbatches)]
    forwarded: set[tuple[int, int]] = set()
    awaited: set[tuple[int, int]] = set()  # gradients that have arrived at a stage

    def backward(stage: int, j: int) -> None:
        if (stage, j) in forwarded and (stage == last or (stage, j) in awaited):
            ready.append(Action(stage, "B" if random.random() < fused else "I", j))

    while ready:
        action = ready.pop(random.randrange(len(ready)))
        stage, letter, j = action
        ranks[problem.placement.rank_of[stage]].append(action)
        if letter == "F":
            forwarded.add((stage, j))
            if stage < last:
                ready.append(Action(stage + 1, "F", j))
            backward(stage, j)
        elif letter in "IB" and stage > 0:
            awaited.add((stage - 1, j))
            backward(stage - 1, j)
        if letter == "I":
            ready.append(Action(stage, "W", j))
    return Orders.from_actions(ranks)


def reference_gradients(model: PipelineModel, microbatches: int, step: int = 0) -> tuple[Gradients, float]:
    """Gradients by parameter name, and the loss, of plain autograd on the uncut model."""
    module = model.build_stage(0, 1, _CPU)
    total = torch.zeros(())
    for index in range(microbatches):
        input, target = model.microbatch(step, index)
        loss = model.loss(module(input), target) / microbatches
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        total += loss.detach()
    return gradients_of([module]), float(total)


def run_rank(
    plan: RankPlan, model: PipelineModel, transport: Transport, timeout: float, look_ahead: int = 2
) -> tuple[Gradients, StepResult]:
    """One step of one rank with fresh stages; its gradients by parameter name.

    The transport's channels must be open.
    """
    stages = build_stages(model, plan, _CPU)
    options = ExecutorOptions(look_ahead=look_ahead)
    executor = Executor(plan, stages, model, transport, device=_CPU, timeout=timeout, options=options)
    result = executor.step(0)
    kept = {index: stage.held for index, stage in stages.items() if any(stage.held)}
    if kept:
        raise RuntimeError(f"stages still hold microbatches after the step: {kept}")
    return gradients_of([stage.module for stage in stages.values()]), result


def run_in_threads(
    problem: Problem, orders: Orders, model: PipelineModel, timeout: float = 30.0, look_ahead: int = 2
) -> tuple[Gradients, float]:
    """One step of a plan, its ranks as threads of this process; all gradients, and the loss."""

    def of_rank(transport: Transport) -> tuple[Gradients, StepResult]:
        plan = RankPlan.of("check", problem, orders, transport.pp_rank)
        transport.open([key_of(channel) for channel in plan.channels], timeout)
        return run_rank(plan, model, transport, timeout, look_ahead)

    found = ThreadHub(problem.pp_degree).run(of_rank, timeout * 2)
    gradients = {name: gradient for each, _ in found for name, gradient in each.items()}
    return gradients, sum(sum(result.losses.values()) for _, result in found) / problem.microbatches


def of_rank(folder: Path) -> dict[str, tuple[Gradients, dict[int, float]]]:
    """This rank's gradients and losses of every ``*.plan.json`` of a folder."""
    transport = connect(World.from_environment(), "gloo", _CPU, TIMEOUT)
    found = {}
    for path in sorted(folder.glob("*.plan.json")):
        plan = PlanSource(file=path).rank_plan(transport.rank, TIMEOUT)
        gathered = transport.gather([key_of(channel) for channel in plan.channels], TIMEOUT)
        transport.open({ChannelKey(*key) for keys in gathered for key in keys}, TIMEOUT)
        name = path.name.removesuffix(".plan.json")
        model = NestedModel() if name.startswith("nested") else hard_model()
        gradients, result = run_rank(plan, model, transport, TIMEOUT)
        transport.flush(TIMEOUT)
        found[name] = gradients, result.losses
    transport.barrier(TIMEOUT)
    transport.close()
    return found
