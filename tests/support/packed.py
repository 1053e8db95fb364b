"""A small transformer that trains on packed sequences, and a data loader that plans its steps."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple

import torch
import zbv_solver
import zbv_worker as zbv
from torch import Tensor, nn
from torch.nn import functional as nnf

WORDS, WIDTH, BLOCKS = 11, 8, 6


class Block(nn.Module):
    """Attention within each sequence, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, cu_seqlens: Tensor) -> Tensor:
        mixed = []
        for begin, end in pairwise(cu_seqlens.tolist()):
            q, k, v = self.projection(x[begin:end]).chunk(3, -1)
            mixed.append(nnf.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0])
        found: Tensor = x + self.out(torch.cat(mixed)).tanh()
        return found


def model() -> nn.Sequential:
    """Eight layers with equal parameters wherever they are built."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Embedding(WORDS, WIDTH), *(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, WORDS)
    )


def loss_sum(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """The sum over the tokens, and their number."""
    return nnf.cross_entropy(output, target, reduction="sum"), target.numel()


def shape_of(features: Mapping[str, float]) -> Tensor:
    """What passes between all layers."""
    return torch.empty(int(features["tokens"]), WIDTH, device="meta")


class PackedBatch(NamedTuple):
    """Sequences one after the other, and which microbatch has which of them."""

    tokens: Tensor
    targets: Tensor
    cu_seqlens: Tensor
    sequences: list[list[int]]

    @classmethod
    def random(cls, seed: int, microbatches: int) -> PackedBatch:
        """One to three sequences of 1 to 20 tokens per microbatch, in no order."""
        random = Random(seed)
        chosen = [at for at in range(microbatches) for _ in range(random.randint(1, 3))]
        random.shuffle(chosen)
        sequences = [[i for i, at in enumerate(chosen) if at == j] for j in range(microbatches)]
        return cls.of_lengths([random.randint(1, 20) for _ in chosen], sequences, seed)

    @classmethod
    def of_lengths(cls, lengths: list[int], sequences: list[list[int]], seed: int) -> PackedBatch:
        generator = torch.Generator().manual_seed(seed)
        tokens, targets = torch.randint(WORDS, (2, sum(lengths)), generator=generator)
        offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        return cls(tokens, targets, offsets, sequences)

    def microbatches(self) -> list[zbv.Microbatch]:
        """The same, cut by hand."""
        made, offsets = [], self.cu_seqlens.tolist()
        for own in self.sequences:
            index = torch.cat([torch.arange(offsets[at], offsets[at + 1]) for at in own])
            lengths = [offsets[at + 1] - offsets[at] for at in own]
            cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
            made.append(zbv.Microbatch(self.tokens[index], self.targets[index], {"cu_seqlens": cu_seqlens}))
        return made


def trained_alone(batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean loss and the gradients of one process."""
    layers, output = model(), batch.tokens
    for layer in layers:
        output = layer(output, **({"cu_seqlens": batch.cu_seqlens} if isinstance(layer, Block) else {}))
    mean = loss_sum(output, batch.targets)[0] / len(batch.targets)
    torch.autograd.backward(mean)
    return mean.detach(), {name: p.grad for name, p in layers.named_parameters() if p.grad is not None}


def require_trained(pipe: zbv.Pipeline, wanted: Mapping[str, Tensor]) -> None:
    """Require the gradients of one process, up to a part of the largest element of all; then drop them."""
    scale = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=0, atol=1e-5 * scale, msg=name)
        parameter.grad = None


def per_step_problem(p: int, microbatches: int) -> dict[str, Any]:
    """Costs by tokens; 20 tokens per microbatch are typical."""
    costs = {"tokens": 1.0, "tokens_squared": 0.05}
    return {
        "pp_degree": p,
        "microbatches": microbatches,
        "sequences": [[20]] * microbatches,
        "costs": dict.fromkeys(("forward", "backward_input", "backward_weight"), costs),
    }


class PlannedSteps:
    """Plans of random batches, for the process of a data loader; one step has none."""

    def __init__(self, p: int, microbatches: int, unplanned: int):
        parsed = zbv_solver.parse(per_step_problem(p, microbatches))
        assert isinstance(parsed, zbv_solver.Problem)
        self._microbatches, self._unplanned = microbatches, unplanned
        self._planner = zbv_solver.StepPlanner(parsed)

    def __getitem__(self, step: int) -> zbv_solver.Plan | None:
        if step == self._unplanned:
            return None
        batch = PackedBatch.random(step, self._microbatches)
        lengths = batch.cu_seqlens.diff().tolist()
        own = [[lengths[at] for at in some] for some in batch.sequences]
        values = {
            "tokens": [sum(some) for some in own],
            "tokens_squared": [sum(length**2 for length in some) for some in own],
        }
        return self._planner.plan(values, seconds=0.02)
