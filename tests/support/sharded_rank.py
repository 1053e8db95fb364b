"""A rank that trains models with and without sharding and writes down the parameters and what happened.

Under torchrun's environment: ``python -m support.sharded_rank FOLDER``. Four ranks: two replicas of a V.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import Problem
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.model.spec import ModelSpec
from zbv_worker.models.gpt import GPT, GptConfig
from zbv_worker.stage.stage import Stage
from zbv_worker.training.options import RunOptions, TrainingOptions
from zbv_worker.training.run import train
from zbv_worker.training.shards import ShardBucket, Unit
from zbv_worker.transport.channels import Reduction
from zbv_worker.transport.gloo import GlooTransport
from zbv_worker.transport.gloo_control import GlooControl
from zbv_worker.transport.world import Layout, World

from support.cut_models import cut_problem
from support.selfcheck import HardModel, random_orders

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


class Hard(HardModel):
    """Also keeps what it built; its parameters do not divide evenly, and some are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.built: list[nn.Module] = []

    def build_layers(self, names: Sequence[str], device: torch.device) -> nn.Sequential:
        self.built.append(module := super().build_layers(names, device))
        return module


class Hooked(Small):
    """With a hook that masks a gradient; it must see the whole gradient of each backward."""

    def build_layers(self, names: Sequence[str], device: torch.device) -> nn.Sequential:
        module = super().build_layers(names, device)
        for parameter in module.parameters():
            if parameter.dim() == 2:
                parameter.register_hook(_masked)  # type: ignore[no-untyped-call]  # torch's own
                break
        return module


class Tempered(Small):
    """With a loss that has a parameter, in a module that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.loss_module = nn.ParameterList([torch.ones(3)])

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return super().loss(output * self.loss_module[0].mean(), target)


def _masked(gradient: Tensor) -> Tensor:
    return gradient * (torch.arange(gradient.numel()).view_as(gradient) % 3 > 0)


@dataclass(frozen=True)
class Case:
    """A model and how to train it."""

    model: Callable[[], Any]
    problem: Problem
    options: dict[str, Any]

    @property
    def orders(self) -> Orders:
        return random_orders(self.problem, Random(7), 0.3)


def _gpt(**cut: Any) -> Problem:
    return cut_problem(Small().layer_names(), (2, 1, 1, 2), **cut)


CASES = {
    "uneven": Case(Hard, cut_problem(HardModel().layer_names(), (3, 2, 1, 2)), {}),
    "recomputed": Case(Small, _gpt(recompute=RECOMPUTED), {"evaluate_every": 1}),
    "tied": Case(lambda: Small(tied=True), _gpt(), {}),
    "mixed": Case(Small, _gpt(), {"precision": "bfloat16"}),
    "half": Case(lambda: Small(dtype=torch.bfloat16), _gpt(), {}),
    "hooked": Case(Hooked, _gpt(), {}),
    "clipped": Case(Small, _gpt(), {"clip_norm": 0.1}),
    "tempered": Case(Tempered, _gpt(), {}),
}


class Watched(GlooTransport):
    """Writes down when sums of sharded gradients are awaited."""

    events: list[tuple[str, str, int]]

    def sum_parts_over_replicas(self, whole: Tensor, part: Tensor) -> Reduction:
        self.events.append(("sum", str(whole.dtype), whole.nbytes))
        return _Awaited(super().sum_parts_over_replicas(whole, part), self.events)


@dataclass(frozen=True)
class _Awaited:
    reduction: Reduction
    events: list[tuple[str, str, int]]

    def wait(self, timeout: float) -> None:
        self.events.append(("awaited", "", 0))
        self.reduction.wait(timeout)


@contextmanager
def watching(events: list[tuple[str, str, int]]) -> Iterator[None]:
    """Write down gathers, frees and actions, each with the bytes of whole parameters held afterwards."""
    buckets: dict[ShardBucket, None] = {}

    def watched(kind: type, name: str, label: Callable[..., str]) -> Any:
        original = getattr(kind, name)

        def call(self: Any, *args: Any, **keywords: Any) -> Any:
            if isinstance(self, Unit):
                buckets.update(dict.fromkeys(self.buckets))
            result = original(self, *args, **keywords)
            events.append((name, label(self, *args), held(buckets)))
            return result

        return patch.object(kind, name, call)

    with ExitStack() as stack:
        for name in ("gather", "complete", "free"):
            stack.enter_context(watched(Unit, name, lambda unit, *_: unit.name))
        for name in ("forward", "backward", "backward_input", "backward_weight", "evaluate"):
            stack.enter_context(watched(Stage, name, lambda stage, *_: str(stage.index)))
        yield


def held(buckets: Iterable[ShardBucket]) -> int:
    """The bytes of whole parameters."""
    return sum(each.storage.untyped_storage().nbytes() for bucket in buckets for each in bucket.parameters)


def trained(case: Case, transport: Watched, *, is_sharded: bool, steps: int = 2) -> dict[str, Any]:
    """The parameters by name, the losses and norms of the steps, and what happened."""
    plan = RankPlan.of("0" * 64, case.problem, case.orders, transport.pp_rank)
    options = TrainingOptions(replicas=2, is_sharded=is_sharded, **case.options)
    model, transport.events = case.model(), []
    run = RunOptions((), ModelSpec("tests:model"), steps, timeout=TIMEOUT, training=options)
    with watching(transport.events):
        (report,) = train(run, [plan], model, transport, CPU)
    named = [pair for module in model.built for pair in module.named_parameters()]
    return {
        "parameters": {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in named},
        "kept": {n: p.to_local().numel() if isinstance(p, DTensor) else p.numel() for n, p in named},
        "losses": [line.loss for line in report.lines],
        "norms": [line.updated.gradient_norm for line in report.lines],
        "evaluations": report.evaluations,
        "events": transport.events,
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    world = World.from_environment()
    transport = Watched(GlooControl(world, TIMEOUT, Layout.of_world(4, 2)), CPU, TIMEOUT)
    found = {
        name: {is_sharded: trained(case, transport, is_sharded=is_sharded) for is_sharded in (False, True)}
        for name, case in CASES.items()
    }
    torch.save(found, folder / f"rank-{world.rank}.pt")
    transport.barrier(TIMEOUT)
    transport.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
