"""Inputs of single blocks: a vector per token and block, from a separate table (per-layer embeddings).

Gemma Team 2025, Gemma 3n; ``models/gemma4/modeling_gemma4.py`` of transformers 5.
"""

from __future__ import annotations

from dataclasses import dataclass

from zbv_models.estimate.part import Held, Part, Product, gradient, norm_tensors
from zbv_models.estimate.shapes import INDEX_BYTES, Parameters, PerAction, Shapes


@dataclass(frozen=True)
class LayerInput:
    """The last part of a block: a row of its table and a product of the embedding, scaled by the stream.

    Each block has its part of the table and of the product, as if a program divided them by blocks. That the
    embedding of a token must reach every rank for the product is not counted.
    """

    vocabulary: int
    width: int
    """Width of the vector."""

    def part(self, shapes: Shapes) -> Part:
        """Costs and memory on one device; only the table is divided by tensor parallelism."""
        h, width, own = shapes.stream.hidden, shapes.own(self.width), shapes.own_tokens
        down, up = Product(own, h, self.width), Product(own, self.width, h)
        return Part(
            parameters=self.parameters(shapes),
            products=(down, down, up),
            tensors=(
                *norm_tensors(shapes, "the norm of the block's own input"),
                Held("tokens", INDEX_BYTES * own, after_input=True),
                Held("embedding of the tokens", shapes.hidden, after_input=True),
                Held("input of the gate", shapes.hidden, after_input=True),
                Held(
                    "the block's own input, its gate and their product",
                    4 * width,
                    after_input=True,
                    for_input=True,
                ),
                Held("output of the product back", shapes.hidden),
                gradient("gradient of the product back", shapes.hidden),
            ),
            moved=PerAction(4 * shapes.hidden + 8 * width, 6 * shapes.hidden + 10 * width),
            exchanges=(),
            workspace=2 * shapes.hidden + shapes.weight(self.vocabulary, self.width),
            output_bytes=shapes.hidden,
        )

    def parameters(self, shapes: Shapes) -> Parameters:
        """The block's part of the table, three matrices, and a norm."""
        h, table = shapes.stream.hidden, self.vocabulary * self.width
        return Parameters(
            shared=table, replicated=3 * h * self.width + h * shapes.stream.norm_values, tables=table
        )
