"""A rank that trains a small transformer on packed sequences, and compares with one process.

Under torchrun's environment: ``python -m support.packed_rank FOLDER``. The folder has plan files and
``cases.json``; the rank writes what it found to ``rank-RANK.json``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
import zbv_worker as zbv
from torch import Tensor, nn
from torch.nn import functional as nnf

WORDS, WIDTH, BLOCKS, TIMEOUT = 11, 8, 6, 60.0


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
    """Eight layers with equal parameters on every rank."""
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


def step(pipe: zbv.Pipeline, batch: PackedBatch, mode: str, call: str) -> Any:
    """A call with all data on every rank, only what the rank needs, or everything on one rank."""
    run = getattr(pipe, call)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if mode == "data rank" and rank != world - 1:
        return run()
    if mode == "microbatches":
        return run(microbatches=batch.microbatches())
    tokens: Tensor | None = batch.tokens
    targets: Tensor | None = batch.targets
    if mode == "parts":
        names = [name for name, _ in pipe.named_parameters()]
        tokens, targets = (
            each if f"{layer}.weight" in names else None
            for each, layer in ((tokens, 0), (targets, BLOCKS + 1))
        )
    if mode == "planned":  # the plan says which microbatch has which sequences
        return run(tokens, targets, cu_seqlens=batch.cu_seqlens)
    return run(tokens, targets, cu_seqlens=batch.cu_seqlens, sequences=batch.sequences)


def trained_alone(reference: nn.Sequential, batch: PackedBatch) -> Tensor:
    """The mean loss of one process, which also has the gradients."""
    output = batch.tokens
    for layer in reference:
        output = layer(output, **({"cu_seqlens": batch.cu_seqlens} if isinstance(layer, Block) else {}))
    mean = loss_sum(output, batch.targets)[0] / len(batch.targets)
    torch.autograd.backward(mean)
    return mean.detach()


def gradients_apart(pipe: zbv.Pipeline, reference: nn.Sequential) -> float:
    """The largest difference of a gradient, relative to the largest element of all."""
    named = dict(reference.named_parameters())
    scale = max(float(p.grad.abs().max()) for p in named.values() if p.grad is not None)
    differences = [0.0]
    for name, parameter in pipe.named_parameters():
        own, right = parameter.grad, named[name].grad
        assert own is not None
        assert right is not None
        differences.append(float((own - right).abs().max()) / scale)
    return max(differences)


def run_case(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Steps and an evaluation; the largest differences of losses and gradients from one process."""
    reference, mode = model(), case["mode"]
    given: dict[str, Any] = {"data_rank": int(os.environ["WORLD_SIZE"]) - 1} if mode == "data rank" else {}
    if case.get("stated"):
        given["shape_of"] = shape_of
    gradients, losses = [], []
    with zbv.Pipeline(
        folder / f"{case['plan']}.json", model(), loss_sum, timeout=TIMEOUT, startup_timeout=TIMEOUT, **given
    ) as pipe:
        for seed in case["seeds"]:
            batch = PackedBatch.random(seed, case["microbatches"])
            if "lengths" in case:
                batch = PackedBatch.of_lengths(case["lengths"], case["sequences"], seed)
            for parameter in [*reference.parameters(), *pipe.parameters()]:
                parameter.grad = None
            expected = trained_alone(reference, batch)
            evaluated = step(pipe, batch, mode, "evaluate")
            loss = step(pipe, batch, mode, "step")
            if loss is not None:
                losses += [float(abs(each - expected) / expected) for each in (loss, evaluated)]
            gradients.append(gradients_apart(pipe, reference))
        boundaries = {str(at): str(each) for at, each in pipe.boundaries.items()}
    return {"gradients": max(gradients), "losses": losses, "boundaries": boundaries}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    cases = json.loads((folder / "cases.json").read_text())
    found = {name: run_case(folder, case) for name, case in cases.items()}
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
