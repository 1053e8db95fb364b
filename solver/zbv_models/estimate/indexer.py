"""An indexer: it chooses the tokens that a query attends to (DeepSeek-AI 2025b, DeepSeek-V3.2, §2.1).

Its heads compare every query with all keys, and attention uses the best ones. The heads share their keys. A
device computes it for its own tokens, with all heads (Megatron-LM, ``DSAIndexer``).
"""

from __future__ import annotations

from dataclasses import dataclass

from zbv_models.estimate.amounts import PerAction
from zbv_models.estimate.part import Held, Product, gradient
from zbv_models.estimate.shapes import Shapes

CHOICE_BYTES = 4
"""Size of the index of a chosen token."""


@dataclass(frozen=True)
class Indexer:
    """Heads that choose tokens.

    Attributes
    ----------
    dim
        Width of a head.
    """

    heads: int
    dim: int

    def products(self, shapes: Shapes, width: int) -> tuple[Product, ...]:
        """Queries from a vector of a width; keys and weights of heads from the block's input."""
        rows, h = shapes.own_tokens, shapes.stream.hidden
        return (
            Product(rows, width, self.heads * self.dim, is_narrow=False),
            Product(rows, h, self.dim + self.heads, is_narrow=False),
        )

    def parameters(self, shapes: Shapes, width: int) -> int:
        """Its matrices, and the LayerNorm of its keys."""
        return width * self.heads * self.dim + shapes.stream.hidden * (self.dim + self.heads) + 2 * self.dim

    def flops(self, shapes: Shapes, pairs: float) -> PerAction:
        """Operations of its scores for all pairs of a sequence; I has two products, for queries and keys."""
        whole = shapes.tokens // shapes.own_tokens * shapes.degrees.context
        once = 2.0 * pairs * shapes.sequences * self.heads * self.dim / whole
        return PerAction(once, 2 * once, 0.0)

    def tensors(self, shapes: Shapes, chosen: int) -> list[Held]:
        """Its queries, keys and weights, and what it chooses; the scores are not kept."""
        widths = self.heads * self.dim + self.dim + self.heads
        return [
            Held("queries, keys and weights of the indexer", shapes.own(widths)),
            Held("chosen tokens", CHOICE_BYTES * shapes.own_tokens * min(chosen, shapes.sequence)),
            gradient("gradients of the indexer's queries, keys and weights", shapes.own(widths)),
        ]

    def traffic(self, shapes: Shapes, chosen: int) -> PerAction:
        """Norm and rotation of queries and keys, and the choice."""
        moved = 2.0 * shapes.own((self.heads + 1) * self.dim)
        choice = CHOICE_BYTES * shapes.own_tokens * min(chosen, shapes.sequence)
        return PerAction(moved + choice, moved + choice)
