"""A model whose layers exchange tokens with the rank's neighbour, for a while."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from zbv_worker.model.layer_list import LayerList

from benchmarks.worker.pairs import ROWS, WIDTH, Layer, Wire


class Experts(LayerList):
    """A pipeline model of layers with experts between two without."""

    def microbatch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(index))
        return x, x.flip(1)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.0)


def experts(*, blocks: int, seconds: float, seed: int = 0) -> Experts:
    """The factory; two neighbours share the experts. F and I of a block exchange for half of their time."""
    group = None
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        group, _ = dist.new_subgroups(2)  # type: ignore[no-untyped-call]  # torch's own
    part = round(1e9 * seconds / 4)
    middle = {f"block.{at}": partial(Layer, Wire(group, part), part) for at in range(blocks)}
    ends = [partial(nn.Linear, WIDTH, WIDTH)] * 2
    return Experts({"embedding": ends[0], **middle, "head": ends[1]}, seed)
