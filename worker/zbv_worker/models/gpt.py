"""A small GPT as a pipeline model: character level, pre-norm, causal attention, learned positions.

The first stage begins with the embedding, the last ends with the final norm and the language-model head.
Blocks are divided evenly unless the plan has a partition. Every layer draws its initial parameters from its
own generator, so the model is the same for every partition.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from zbv_worker.model.layer_list import stacked
from zbv_worker.model.optimizers import adamw
from zbv_worker.models.text import VOCABULARY, sample, standard_library_text


@dataclass(frozen=True)
class GptConfig:
    """Sizes and training settings of the model."""

    layers: int = 8
    width: int = 192
    heads: int = 6
    """Transformer blocks, their model dimension and attention heads."""
    length: int = 128
    sequences: int = 4
    """Characters per sequence, and sequences per microbatch."""
    characters: int = 1_000_000
    """How much of the text to use."""
    learning_rate: float = 1e-3
    dropout: float = 0.0
    """Dropout probability of each block's two outputs."""
    tied: bool = False
    """Whether the head shares the embedding's weights. The first and the last stage must then be on one
    rank."""

    def __post_init__(self) -> None:
        if self.layers < 1 or self.width < 1 or self.heads < 1 or self.width % self.heads:
            raise ValueError(
                f"found layers={self.layers}, width={self.width}, heads={self.heads}; all must be at least "
                f"1, and heads must divide width."
            )


def gpt(*, seed: int = 0, **config: Any) -> GPT:
    """The factory; takes the fields of :class:`GptConfig` as keyword arguments."""
    return GPT(GptConfig(**config), seed)


class GPT:
    """The pipeline model; its layers are ``embedding``, ``block.0`` and so on, and ``head``.

    See :class:`zbv_worker.model.PipelineModel`.
    """

    def __init__(self, config: GptConfig, seed: int):
        self.config = config
        self._seed = seed

    def build_stage(self, stage: int, n_stages: int, device: torch.device) -> nn.Module:
        """Stage k of S: blocks kL/S to (k+1)L/S, with the embedding in the first and the head in the last."""
        first, last = (at * self.config.layers // n_stages for at in (stage, stage + 1))
        begin = 0 if stage == 0 else first + 1
        end = self.config.layers + 2 if stage == n_stages - 1 else last + 1
        return self.build_layers(self.layer_names()[begin:end], device)

    def layer_names(self) -> Sequence[str]:
        """The embedding, the blocks, the head."""
        return ["embedding", *(f"block.{block}" for block in range(self.config.layers)), "head"]

    def build_layers(self, names: Sequence[str], device: torch.device) -> nn.Sequential:
        """Layers by name."""
        return stacked({name: self._layer(name) for name in names}).to(device)

    def microbatch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        """Characters and their successors, each (sequences, length)."""
        text = standard_library_text(self.config.characters)
        return sample(text, self.config.sequences, self.config.length, (self._seed, step, index))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean cross entropy, in nats per character."""
        return nnf.cross_entropy(output.flatten(0, 1), target.flatten())

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """AdamW."""
        return adamw(parameters, lr=self.config.learning_rate)

    def tied_parameters(self) -> Sequence[tuple[str, str]]:
        """The embedding's weight and the head's, if they are shared."""
        return [("embedding.token.weight", "head.logits.weight")] if self.config.tied else []

    def _layer(self, name: str) -> nn.Module:
        """A layer with its initial parameters, which depend on its index in the model."""
        if name == "embedding":
            return self._seeded(0, Embedding(self.config.width, self.config.length))
        if name == "head":
            return self._seeded(self.config.layers + 1, Head(self.config.width))
        block = int(name.removeprefix("block."))
        return self._seeded(block + 1, Block(self.config.width, self.config.heads, self.config.dropout))

    def _seeded(self, layer: int, module: nn.Module) -> nn.Module:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + layer)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if parameter.dim() >= 2:
                    parameter.normal_(std=0.02, generator=generator)
                elif name.endswith("bias"):
                    parameter.zero_()
        return module


class Embedding(nn.Module):
    """Characters (b, t) to vectors (b, t, width): token plus position."""

    def __init__(self, width: int, length: int):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(length, width)

    def forward(self, characters: Tensor) -> Tensor:
        """Sum of the two embeddings."""
        positions = torch.arange(characters.shape[1], device=characters.device)
        output: Tensor = self.token(characters) + self.position(positions)
        return output


class Block(nn.Module):
    """A transformer block, (b, t, width) to (b, t, width)."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0):
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Attention and MLP, each with a residual connection."""
        b, t, width = x.shape
        qkv = self.query_key_value(self.norm_attention(x)).view(b, t, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = nnf.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.projection(mixed.transpose(1, 2).reshape(b, t, width)))
        output: Tensor = x + self.dropout(self.contract(nnf.gelu(self.expand(self.norm_mlp(x)))))
        return output


class Head(nn.Module):
    """Final norm and language-model head: (b, t, width) to logits (b, t, characters)."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the next character."""
        logits: Tensor = self.logits(self.norm(x))
        return logits
