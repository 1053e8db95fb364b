"""The indexer of sparse attention."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zbv_models.estimate.part import Held, Part, Product, gradient
from zbv_models.estimate.sees import Sees
from zbv_models.estimate.shapes import Parameters, PerAction, Shapes

CHOICE_BYTES = 4
"""Size of the index of a chosen token."""


@dataclass(frozen=True)
class Indexer:
    """Heads that choose the tokens that a query attends to (DeepSeek-AI 2025b, DeepSeek-V3.2, §2.1).

    They compare every query with all keys, which they share, and attention uses the best ones. A device
    computes them for its own tokens, with all heads (Megatron-LM, ``DSAIndexer``).
    """

    heads: int
    dim: int
    """Width of a head."""
    pool: int = 1
    """Tokens whose keys become one, with weights from a product of the block's input."""

    def added_to(self, part: Part, shapes: Shapes, sees: Sees, width: int) -> Part:
        """Attention with these heads, whose queries come from a vector of a width.

        Keys and weights of heads come from the block's input. I has two products, for queries and keys; the
        scores are not kept.
        """
        rows, h, queries = shapes.own_tokens, shapes.stream.hidden, self.heads * self.dim
        pairs = Sees(causal=sees.causal).pairs(shapes.sequence)
        whole = shapes.tokens // rows * shapes.degrees.context
        core = 2.0 * pairs * shapes.sequences * queries / whole / self.pool
        chosen = CHOICE_BYTES * rows * min(sees.window or shapes.sequence, shapes.sequence)
        from_input = self.dim * (1 if self.pool == 1 else 2) + self.heads
        kept = shapes.own(queries + from_input)
        # Norm and rotation of queries and keys, and the choice.
        moved = 2.0 * shapes.own(queries + self.dim) + chosen
        # Its matrices, the LayerNorm of its keys, and a position in a pool.
        parameters = width * queries + h * from_input + 2 * self.dim
        parameters += self.pool * self.dim if self.pool > 1 else 0
        return replace(
            part,
            parameters=part.parameters + Parameters(replicated=parameters),
            products=(
                *part.products,
                Product(rows, width, queries, is_narrow=False),
                Product(rows, h, from_input, is_narrow=False),
            ),
            core=part.core + PerAction(core, 2 * core),
            tensors=(
                *part.tensors,
                Held("queries, keys and weights of the indexer", kept),
                Held("chosen tokens", chosen),
                gradient("gradients of the indexer's queries, keys and weights", kept),
            ),
            moved=part.moved + PerAction(moved, moved),
            saved=None,
        )
