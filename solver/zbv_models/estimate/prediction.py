"""The first part of a multi-token-prediction module (DeepSeek-AI 2024b, DeepSeek-V3, §2.2).

It looks up the next token, normalises it and the stream, joins both and projects them to the stream's width.
A block of the model follows, then a norm; the head computes the logits. The table of tokens is the
embedding's: a rank without the embedding has a copy of it (Megatron-LM, ``MultiTokenPredictionLayer``).
"""

from __future__ import annotations

from dataclasses import dataclass

from zbv_models.estimate.amounts import PerAction
from zbv_models.estimate.ends import Embedding
from zbv_models.estimate.parameters import Parameters
from zbv_models.estimate.part import Exchange, Held, Part, Product, gradient, group_sum
from zbv_models.estimate.shapes import Shapes


@dataclass(frozen=True)
class Joining:
    """The projection of a module's two inputs, with the norms of both and of its output.

    Attributes
    ----------
    copies_table
        Whether the module's rank holds a copy of the embedding's table.
    """

    embedding: Embedding
    copies_table: bool = False

    def part(self, shapes: Shapes) -> Part:
        """Costs and memory on one device."""
        h, t, hidden = shapes.stream.hidden, shapes.tensor, shapes.hidden
        looked_up = self.embedding.traffic(shapes)
        norms = PerAction(3 * 2 * hidden, 3 * 3 * hidden)
        # Each device computes a share of the output's columns, which are then gathered.
        return Part(
            parameters=self.parameters(shapes),
            products=(Product(shapes.tokens, 2 * h, h // t),),
            tensors=tuple(self.tensors(shapes)),
            moved=norms + looked_up,
            exchanges=(self.exchange(shapes), self.embedding.exchange(shapes)),
            workspace=max(3 * shapes.whole, shapes.whole + shapes.weight(self.embedding.vocabulary, h)),
            output_bytes=hidden,
        )

    def parameters(self, shapes: Shapes) -> Parameters:
        """Three norms and the projection; the table only where it is a copy."""
        h = shapes.stream.hidden
        table = self.embedding.vocabulary * h if self.copies_table else 0
        norms = 3 * h * shapes.stream.norm_values
        return Parameters(shared=2 * h * h + table, replicated=norms, tables=table)

    def tensors(self, shapes: Shapes) -> list[Held]:
        """Inputs of the three norms, of the projection, and the gradients that wait for W."""
        hidden = shapes.hidden
        return [
            Held("the stream", hidden, is_input=True),
            Held("rows of the next tokens", hidden),
            Held("input of the last norm", hidden),
            Held("statistics of three norms", 3 * shapes.statistics * shapes.own_tokens),
            Held("input of the projection", shapes.operand(2 * hidden), after_input=True),
            gradient("gradient of the projection", shapes.operand(shapes.divided(shapes.stream.hidden))),
            *(held for held in self.embedding.tensors(shapes) if not held.is_input),
        ]

    def exchange(self, shapes: Shapes) -> Exchange:
        """The input is gathered and the output's columns are joined; their gradients go the other way."""
        if shapes.degrees.sequence_parallel:
            return group_sum(shapes, PerAction(3, 3, 2), PerAction(2, 2, 1))
        return group_sum(shapes, PerAction(1, 4, 0), PerAction(1, 1, 0))
