"""A small GPT that is cut into stages: character level, pre-norm, causal attention, learned positions.

The first stage begins with the embedding, the last ends with the final norm and the language-model head;
blocks are spread evenly unless the plan says where to cut. Every layer draws its initial parameters from a
generator of its own, so the model is the same however it is cut.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from zbv_worker.models.text import VOCABULARY, sample, standard_library_text


def gpt(
    *,
    layers: int = 8,
    width: int = 192,
    heads: int = 6,
    length: int = 128,
    sequences: int = 4,
    characters: int = 1_000_000,
    learning_rate: float = 1e-3,
    dropout: float = 0.0,
    tied: bool = False,
    seed: int = 0,
) -> GPT:
    """The factory.

    Parameters
    ----------
    layers, width, heads
        Transformer blocks, their model dimension and attention heads.
    length, sequences
        Characters per sequence, and sequences per microbatch.
    characters
        How much of the text to use.
    dropout
        Share of each block's two outputs that training leaves out.
    tied
        Whether the head has the embedding's weights. The first and the last stage must be on one rank then.
    """
    return GPT(layers, width, heads, length, sequences, characters, learning_rate, dropout, tied, seed)


class GPT:
    """The pipeline model (see :class:`zbv_worker.model.protocol.PipelineModel`), whose layers are ``embedding``,
    ``block.0`` and so on, and ``head``.
    """

    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        length: int,
        sequences: int,
        characters: int,
        learning_rate: float,
        dropout: float,
        tied: bool,
        seed: int,
    ):
        if layers < 1 or width < 1 or heads < 1 or width % heads:
            raise ValueError(f"found layers={layers}, width={width}, heads={heads}; heads must divide width.")
        self._layers = layers
        self._width = width
        self._heads = heads
        self._length = length
        self._sequences = sequences
        self._characters = characters
        self._learning_rate = learning_rate
        self._dropout = dropout
        self._tied = tied
        self._seed = seed

    def build_stage(self, stage: int, n_stages: int, device: torch.device) -> nn.Module:
        """Stage k of S: blocks kL/S to (k+1)L/S, and the ends of the model at its ends."""
        first, last = (at * self._layers // n_stages for at in (stage, stage + 1))
        begin = 0 if stage == 0 else first + 1
        end = self._layers + 2 if stage == n_stages - 1 else last + 1
        return self.build_layers(self.layer_names()[begin:end], device)

    def layer_names(self) -> Sequence[str]:
        """The embedding, the blocks, the head."""
        return ["embedding", *(f"block.{block}" for block in range(self._layers)), "head"]

    def build_layers(self, names: Sequence[str], device: torch.device) -> nn.Sequential:
        """Layers by name; a module's name has no dot: ``block0``."""
        parts = OrderedDict((name.replace(".", ""), self._layer(name)) for name in names)
        return nn.Sequential(parts).to(device)

    def microbatch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        """Characters and their successors, each (sequences, length)."""
        text = standard_library_text(self._characters)
        return sample(text, self._sequences, self._length, (self._seed, step, index))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean cross entropy, in nats per character."""
        return nnf.cross_entropy(output.flatten(0, 1), target.flatten())

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(parameters, lr=self._learning_rate)

    def tied_parameters(self) -> Sequence[tuple[str, str]]:
        """The embedding's weights and the head's, if they are one."""
        return [("embedding.token.weight", "head.logits.weight")] if self._tied else []

    def _layer(self, name: str) -> nn.Module:
        """A layer with the initial parameters that belong to its place in the model."""
        if name == "embedding":
            return self._seeded(0, Embedding(self._width, self._length))
        if name == "head":
            return self._seeded(self._layers + 1, Head(self._width))
        block = int(name.removeprefix("block."))
        return self._seeded(block + 1, Block(self._width, self._heads, self._dropout))

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
    """A transformer block, (b, t, width) to the same."""

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
