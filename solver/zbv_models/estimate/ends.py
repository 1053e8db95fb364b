"""The ends of the model: look-up of tokens, and the product with the vocabulary with the loss."""

from __future__ import annotations

from dataclasses import dataclass

from zbv_models.estimate.amounts import PerAction
from zbv_models.estimate.parameters import Parameters
from zbv_models.estimate.part import (
    Exchange,
    Held,
    Part,
    Product,
    dropout_tensors,
    dropout_traffic,
    gradient,
    group_sum,
    norm_tensors,
)
from zbv_models.estimate.shapes import INDEX_BYTES, STATISTIC_BYTES, Shapes


@dataclass(frozen=True)
class Embedding:
    """Look-up of tokens, and of learned positions. I computes nothing: the gradient that arrives waits for W.

    Attributes
    ----------
    gradient_bytes
        Size of an accumulated gradient of a parameter.
    """

    vocabulary: int
    learned_positions: bool = False
    gradient_bytes: float = 2.0

    def part(self, shapes: Shapes) -> Part:
        """Costs and memory on one device."""
        whole, h = shapes.whole, shapes.stream.hidden
        # F computes rows for tokens and positions, then their sum. B computes a gradient of the whole table.
        rows = whole + (shapes.positions + whole if self.learned_positions else 0)
        table = whole + shapes.weight(self.vocabulary, h)
        return Part(
            parameters=self.parameters(shapes),
            products=(),
            tensors=tuple(self.tensors(shapes)),
            moved=self.traffic(shapes),
            exchanges=(self.exchange(shapes),),
            workspace=max(rows, table),
            output_bytes=shapes.hidden,
        )

    def parameters(self, shapes: Shapes) -> Parameters:
        """Table of tokens, divided by vocabulary (Shoeybi et al. 2019, §3), and of learned positions."""
        h = shapes.stream.hidden
        positions = shapes.sequence * h if self.learned_positions else 0
        table = self.vocabulary * h
        return Parameters(shared=table, replicated=positions, tables=table)

    def tensors(self, shapes: Shapes) -> list[Held]:
        """Indices, and the gradients that wait for W."""
        held = [
            Held("tokens", INDEX_BYTES * shapes.tokens, after_input=True, is_input=True),
            gradient("gradient of the embedding", shapes.whole),
        ]
        if self.learned_positions:
            indices = INDEX_BYTES * shapes.sequence // shapes.degrees.context
            held.append(Held("positions", indices, after_input=True))
            held.append(gradient("gradient of the positions", shapes.positions))
        return held + dropout_tensors(shapes, "embedding's dropout mask")

    def traffic(self, shapes: Shapes) -> PerAction:
        """Rows are copied in F. In W a gradient as large as the table is zeroed, filled and added."""
        table = self.vocabulary * shapes.stream.hidden / shapes.tensor
        added = table * (2 * shapes.stream.dtype_bytes + 2 * self.gradient_bytes)
        forward = 2 * shapes.whole + (2 * shapes.hidden if self.learned_positions else 0)
        moved = PerAction(forward, 0.0, 2 * shapes.whole + added)
        return moved + dropout_traffic(shapes, shapes.hidden)

    def exchange(self, shapes: Shapes) -> Exchange:
        """A sum of the parts of the vocabulary in F; with sequence parallelism its gradient is gathered."""
        if shapes.degrees.sequence_parallel:
            return group_sum(shapes, PerAction(1, 1, 0), PerAction(1, 1, 0))
        return group_sum(shapes, PerAction(2, 0, 0), PerAction(1, 0, 0))


@dataclass(frozen=True)
class Head:
    """Final norm, product with the vocabulary, and loss.

    Attributes
    ----------
    has_table
        Whether it has its own matrix; otherwise it uses the embedding's.
    predictions
        Tokens that each position predicts: 1, and one more per multi-token-prediction module, whose outputs
        go through the same matrix (DeepSeek-AI 2024b, DeepSeek-V3, §2.2).
    fused_loss
        Whether the loss is one kernel that overwrites the logits with their gradient, in their own type
        (Transformer Engine, ``parallel_cross_entropy``; Hsu et al. 2024, Liger Kernel, §3.2).
    """

    vocabulary: int
    has_table: bool = True
    predictions: int = 1
    fused_loss: bool = False

    def part(self, shapes: Shapes) -> Part:
        """Costs and memory on one device.

        In addition to the tensors that the loss keeps, I computes two of the same size in float32: the
        gradients after and before the logarithm of the softmax. With a small vocabulary, the two around the
        norm are larger. With few tokens, B needs most: for the gradients of the weight and of its input,
        after the logits of the loss are released.
        """
        h, width = shapes.stream.hidden, self.vocabulary // shapes.tensor
        logits = shapes.divided(self.vocabulary)
        kept = self.kept_logits(shapes)
        extra = 0 if self.fused_loss else 2 * kept
        table = shapes.weight(self.vocabulary, h)
        product = Product(shapes.tokens, h, width, is_narrow=False)
        exchange = self.exchange(shapes)
        return Part(
            parameters=self.parameters(shapes),
            products=(product,) * self.predictions,
            tensors=tuple(self.tensors(shapes)),
            moved=PerAction(2 * shapes.hidden, 3 * shapes.hidden),
            streamed=self.loss_traffic(shapes),
            exchanges=(exchange,) * self.predictions,
            workspace=max(extra, 2 * shapes.whole, table + shapes.whole + logits - kept),
            output_bytes=0,
        )

    def parameters(self, shapes: Shapes) -> Parameters:
        """Final norm, and the matrix to the vocabulary unless it is tied to the embedding."""
        h = shapes.stream.hidden
        table = self.vocabulary * h if self.has_table else 0
        return Parameters(shared=table, replicated=h * shapes.stream.norm_values, tables=table)

    def kept_logits(self, shapes: Shapes) -> int:
        """Size of the tensor that the loss keeps."""
        logits = shapes.divided(self.vocabulary)
        return logits if self.fused_loss else STATISTIC_BYTES * (logits // shapes.stream.dtype_bytes)

    def tensors(self, shapes: Shapes) -> list[Held]:
        """Inputs of norm and product, and logits.

        Korthikanti et al. 2022, §4.3: 2 s b h for the norm, 2 s b h for the product, and 4 s b V for logits
        in float32, of which the loss keeps one tensor.
        """
        logits = shapes.divided(self.vocabulary)
        once = [
            Held("input of the head", shapes.hidden, after_input=True),
            gradient("gradient of the logits", logits),
            Held("logits in the loss", self.kept_logits(shapes)),
            Held("targets", INDEX_BYTES * shapes.tokens),
        ]
        return norm_tensors(shapes, "final norm") + once * self.predictions

    def loss_traffic(self, shapes: Shapes) -> PerAction:
        """Memory traffic of the loss.

        Fused, it reads the logits twice and writes their gradient. Otherwise each operation on the logits in
        float32 is a kernel: F casts them, reads them for the maximum, subtracts it, takes exponentials, reads
        them for the sum, and divides by it; I scales the softmax, and casts it (Megatron-LM,
        ``tensor_parallel/cross_entropy.py``).
        """
        logits, kept = shapes.divided(self.vocabulary), self.kept_logits(shapes)
        if self.fused_loss:
            return PerAction(2 * logits + kept, kept + logits).scaled(self.predictions)
        return PerAction(logits + 9 * kept, 3 * kept + logits).scaled(self.predictions)

    def exchange(self, shapes: Shapes) -> Exchange:
        """The gradient of the head's input is summed in I; sums of the loss over the group are left out."""
        if shapes.degrees.sequence_parallel:
            return group_sum(shapes, PerAction(1, 1, 1), PerAction(1, 1, 1))
        return group_sum(shapes, PerAction(0, 2, 0), PerAction(0, 1, 0))
