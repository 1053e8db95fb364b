"""A small transformer for packed sequences. Attention is quadratic in the length of a sequence."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

WORDS = 64


class Block(nn.Module):
    """A pre-norm transformer block with causal attention within each sequence.

    The first block begins with the embedding, the last one ends with the head: then an even number of blocks
    divides evenly into stages.
    """

    def __init__(self, width: int, heads: int, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(WORDS, width) if is_first else None
        self.before = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.projection = nn.Linear(width, 3 * width)
        self.mixed = nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, WORDS) if is_last else None

    def forward(self, x: Tensor, *, cu_seqlens: Tensor) -> Tensor:
        """(tokens,) or (tokens, width) to (tokens, width) or (tokens, words)."""
        if self.embedding is not None:
            x = self.embedding(x)
        x = x + self.mixed(self._attention(self.projection(self.before[0](x)), cu_seqlens.tolist()))
        x = x + self.narrow(nnf.gelu(self.wide(self.before[1](x))))
        return x if self.head is None else self.head(x)

    def _attention(self, projected: Tensor, offsets: list[int]) -> Tensor:
        """(tokens, 3 x width) to (tokens, width)."""
        parts = projected.view(len(projected), 3, 1, self.heads, -1)
        query, key, value = parts.permute(1, 2, 3, 0, 4).unbind()
        found = [
            nnf.scaled_dot_product_attention(
                query[:, :, begin:end], key[:, :, begin:end], value[:, :, begin:end], is_causal=True
            )
            for begin, end in pairwise(offsets)
        ]
        return torch.cat(found, dim=2)[0].transpose(0, 1).flatten(1)


def blocks(count: int, width: int, heads: int) -> list[Block]:
    """The layers of a model, with equal parameters on every rank."""
    torch.manual_seed(0)
    return [Block(width, heads, is_first=at == 0, is_last=at == count - 1) for at in range(count)]
