"""Runs that save checkpoints: ``zbv-worker run`` in processes, and one rank in this process."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from zbv_worker.checkpoints.checkpoint import CheckpointOptions, Checkpoints, newest_checkpoint
from zbv_worker.checkpoints.checkpoint_state import TrainedState
from zbv_worker.checkpoints.fence import checkpoints
from zbv_worker.gradients.gradients import Gradients
from zbv_worker.gradients.loss_scale import LossScale
from zbv_worker.host.local_ranks import LocalRanks, python_command
from zbv_worker.run.update import Update
from zbv_worker.stage.program import Precision

from support.agents import DEADLINE
from support.plans import random_plan, write_plan
from support.thread_transport import ThreadHub

CPU = torch.device("cpu")
MODEL = {"layers": 4, "width": 16, "heads": 2, "length": 16, "sequences": 2, "characters": 20_000}
STEPS = 7


def write_v(path: Path, p: int, microbatches: int) -> Path:
    """Write a V plan in random order."""
    return write_plan(path, *random_plan(p, microbatches, seed=3))


class Runs:
    """Runs ``zbv-worker run`` in a folder."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._count = 0

    def start(
        self,
        plan: Path,
        *more: str,
        ranks: int = 2,
        steps: int = STEPS,
        module: str = "zbv_worker",
        environment: Mapping[str, str] | None = None,
        **model: Any,
    ) -> LocalRanks:
        self._count += 1
        self.results = self._folder / f"results-{self._count}"
        command = python_command(
            module,
            *("run", "--plan-file", str(plan), "--model", "zbv_worker.models.gpt:gpt", "--threads", "1"),
            *("--model-args", json.dumps(MODEL | model), "--steps", str(steps), "--timeout", "120"),
            *("--result-dir", str(self.results), *more),
        )
        return LocalRanks([command] * ranks, self._folder / f"logs-{self._count}", environment)

    def losses(self, plan: Path, *more: str, ranks: int = 2, **arguments: Any) -> dict[int, float]:
        """Run to the end; losses by step."""
        with self.start(plan, *more, ranks=ranks, **arguments) as started:
            started.wait(timeout=DEADLINE)
        return self.found(ranks)

    def found(self, ranks: int = 2) -> dict[int, float]:
        """The losses of the last run, by step."""
        found: dict[int, float] = {}
        for rank in range(ranks):
            steps = json.loads((self.results / f"rank-{rank}.json").read_text())["steps"]
            found |= {line["step"]: line["loss"] for line in steps if line["loss"] is not None}
        return found


def newest_step(saved: Path) -> int:
    newest: Any = newest_checkpoint(saved)
    return int(newest.name[5:13])


def saving(folder: Path, every: int = 2) -> tuple[str, ...]:
    return "--checkpoint-dir", str(folder), "--checkpoint-every", str(every)


def contents(saved: Path) -> dict[str, bytes]:
    """The files of the checkpoints that count."""
    return {
        str(path.relative_to(saved)): path.read_bytes()
        for folder in checkpoints(saved, lambda _: True).values()
        for path in sorted(folder.iterdir())
    }


@dataclass
class Alone:
    """One rank's checkpoints, in this process."""

    directory: Path
    module: nn.Module
    update: Update
    checkpoints: Checkpoints
    skipped: list[tuple[int, str]]

    @classmethod
    def of(
        cls, directory: Path, seed: int, precision: Precision = "float32", *, is_synchronous: bool = False
    ) -> Alone:
        torch.manual_seed(seed)
        module: nn.Module = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
        transport = ThreadHub(1).transport(0)
        gradients = Gradients({0: module})
        scale = LossScale.of(precision)
        update = Update(StepwiseAdam(), gradients, transport, scale, None)  # type: ignore[arg-type]  # as far as it goes
        options = CheckpointOptions(directory, every=1, is_synchronous=is_synchronous)
        assert update.optimizer is not None
        trained = TrainedState({0: module}, "model", [update.optimizer], [update.schedule], scale)
        skipped: list[tuple[int, str]] = []
        checkpoints = Checkpoints(
            options, trained, transport, CPU, lambda step, why: skipped.append((step, why))
        )
        return cls(directory, module, update, checkpoints, skipped)

    def save(self, step: int) -> None:
        self.checkpoints.save(step)
        self.checkpoints.finish()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.module.zero_grad()
            self.module(torch.randn(5, 4)).square().sum().backward()
            self.update.settle([float(number) for number in self.update.launch(1.0)])


class StepwiseAdam:
    """The part of a model that an update uses; the state of its schedule has a Counter."""

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01)

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5])
