"""A model whose layers exchange tokens with the rank's neighbour, for a while."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from zbv_worker.model.layer_list import LayerList

ROWS, WIDTH = 4, 8


class Exchange(torch.autograd.Function):
    """Sends half of the rows to the neighbour; the backward sends their gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, seconds: float) -> Tensor:
        ctx.group, ctx.seconds = group, seconds
        return exchanged(x, group, seconds)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return exchanged(gradients[0], ctx.group, ctx.seconds), None, None


def exchanged(x: Tensor, group: Any, seconds: float) -> Tensor:
    if group is None:
        return x
    out, arrives = torch.empty_like(x), time.perf_counter() + seconds
    work = dist.all_to_all_single(out, x.contiguous(), group=group, async_op=True)
    work.wait()
    time.sleep(max(0.0, arrives - time.perf_counter()))
    return out


class Sleep(torch.autograd.Function):
    """Takes time in the forward and in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Block(nn.Module):
    """Half of its time passes in exchanges."""

    def __init__(self, group: Any, seconds: float):
        super().__init__()
        self.attention, self.expert = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self._group, self._seconds = group, seconds / 4

    def forward(self, x: Tensor) -> Tensor:
        x = Sleep.apply(self.attention(x), self._seconds)  # type: ignore[no-untyped-call]
        here = Exchange.apply(x, self._group, self._seconds)  # type: ignore[no-untyped-call]
        out = Sleep.apply(self.expert(here), self._seconds)  # type: ignore[no-untyped-call]
        found: Tensor = Exchange.apply(out, self._group, self._seconds)  # type: ignore[no-untyped-call]
        return found


class Experts(LayerList):
    """A pipeline model of blocks with experts between two layers without."""

    def microbatch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(index))
        return x, x.flip(1)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.0)


def experts(*, blocks: int, seconds: float, seed: int = 0) -> Experts:
    """The factory; two neighbours share the experts of a stage."""
    group = None
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        group, _ = dist.new_subgroups(2)  # type: ignore[no-untyped-call]  # torch's own
    middle = {f"block.{at}": partial(Block, group, seconds) for at in range(blocks)}
    ends = [partial(nn.Linear, WIDTH, WIDTH)] * 2
    return Experts({"embedding": ends[0], **middle, "head": ends[1]}, seed)
