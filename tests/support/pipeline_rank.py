"""A rank of programs that need a process: each has its own random numbers, start and errors.

A program of :mod:`support.rank_files`. The folder has the plan; the arguments name functions of this module.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import zbv_worker as zbv
from torch import Tensor, nn
from torch.nn import functional as nnf
from torch.utils.checkpoint import checkpoint

from support.small_pipeline import WIDTH, batch, model

TIMEOUT = 60.0
Found = dict[str, Any]


def pipeline(folder: Path, **more: Any) -> zbv.Pipeline:
    given = {"plan": folder / "plan.json", "loss": nnf.mse_loss, "timeout": TIMEOUT, **more}
    layers = given.pop("layers", None) or model()
    return zbv.Pipeline(given.pop("plan"), layers, startup_timeout=TIMEOUT, **given)


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


class Dropping(nn.Module):
    """A layer with a dropout whose forward is checkpointed; records the masks."""

    def __init__(self, masks: list[list[float]]):
        super().__init__()
        self.linear, self.masks = nn.Linear(WIDTH, WIDTH), masks

    def _drop(self, x: Tensor) -> Tensor:
        mask = nnf.dropout(torch.ones_like(x), training=self.training)
        self.masks.append(mask.flatten().tolist())
        y: Tensor = self.linear(x) * mask
        return y

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self._drop, x, use_reentrant=False)
        return y


def drops(folder: Path) -> Found:
    """The masks of two steps, of a step after the seed was set again, and the user's own random numbers."""
    found, masks = Found(), list[list[float]]()
    torch.manual_seed(5)
    layers = nn.Sequential(*(Dropping(masks) for _ in range(4)))
    with pipeline(folder, layers=layers) as pipe:
        for name in ("first", "second", "evaluated", "again"):
            masks.clear()
            if name in ("first", "again"):
                torch.manual_seed(7)
            before = torch.get_rng_state()
            (pipe.evaluate if name == "evaluated" else pipe.step)(*batch())
            found[name] = [*masks]
            found[f"state of {name}"] = torch.equal(before, torch.get_rng_state())
            found[f"own {name}"] = torch.rand(2).tolist()
    return found


class Failing(nn.Module):
    """Fails in the second step."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 4:
            raise ValueError("this layer is broken")
        return x


def fails(folder: Path) -> Found:
    """A layer of rank 1 fails; afterwards a new pipeline works."""
    layers = [*model()]
    layers[2] = nn.Sequential(layers[2], Failing())
    pipe = pipeline(folder, layers=layers)
    return Found(said=[error_of(lambda: pipe.step(*batch())) for _ in range(3)])


def refuses(folder: Path) -> Found:
    """Errors that a rank finds at the start are raised on all ranks."""
    wrong: tuple[Found, ...] = (
        {"layers": [*model()][:2]},
        {"microbatches": 7},
        {"data_rank": 2},
        {"data_rank": dist_rank()},
        {"layers": [*model(), nn.Tanh()] if dist_rank() else [*model()]},
        {"layers": [*[*model()][:2], (lambda: 3) if dist_rank() else nn.Identity(), *[*model()][3:]]},
        {"layers": [model()[0]] * 4 if dist_rank() else [*model()]},
        {"plan": None, "microbatches": 4, "example": batch()} if dist_rank() else {},
    )
    return Found(said=[error_of(partial(pipeline, folder, **more)) for more in wrong])


def dist_rank() -> int:
    return int(os.environ["RANK"])


def found(folder: Path, *programs: str) -> dict[str, Found]:
    """What this rank saw, by program."""
    return {program: globals()[program](folder) for program in programs}
