"""Four linear layers, a batch for them, and plans of one rank."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from zbv_solver.plans.plan import Plan

from support.cut_models import cut_problem
from support.plans import searched

WIDTH, ROWS = 4, 8
NAMES = ["0", "1", "2", "3"]


def planned(kind: str, microbatches: int = 4) -> Plan:
    """A plan of one rank: ``single``, ``v``, or ``recomputed``, a V whose stages are recomputed."""
    sizes = (4,) if kind == "single" else (1, 3)
    placement = "single" if kind == "single" else "v"
    return searched(cut_problem(NAMES, sizes, [kind == "recomputed"] * len(sizes), microbatches, placement))


def model() -> nn.Sequential:
    """The layers, with equal parameters wherever they are built."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in NAMES))


def batch(seed: int = 1, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Inputs and targets that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


def flat_gradients(parameters: list[nn.Parameter]) -> Tensor:
    """One buffer whose parts become the gradients, as distributed optimizers have it."""
    sizes = [parameter.numel() for parameter in parameters]
    flat = torch.zeros(sum(sizes), dtype=parameters[0].dtype)
    for parameter, part in zip(parameters, torch.split(flat, sizes), strict=True):
        parameter.grad = part.view_as(parameter)
    return flat
