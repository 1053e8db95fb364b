"""The ends of a model: embedding, head, start of a prediction module, and ends of a vision encoder."""

from __future__ import annotations

from dataclasses import dataclass

from zbv_models.estimate.feed_forward import Mlp
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
from zbv_models.estimate.shapes import INDEX_BYTES, STATISTIC_BYTES, Parameters, PerAction, Shapes


@dataclass(frozen=True)
class Embedding:
    """Look-up of tokens, and of learned positions.

    I computes nothing: the gradient that arrives waits for W.
    """

    vocabulary: int
    learned_positions: bool = False
    gradient_bytes: float = 2.0
    """Size of an accumulated gradient of a parameter."""

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
        return held + dropout_tensors(shapes, "embedding")

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
    """Final norm, product with the vocabulary, and loss."""

    vocabulary: int
    has_table: bool = True
    """Whether it has its own matrix; otherwise it uses the embedding's."""
    predictions: int = 1
    """Tokens that each position predicts: 1, and one more per multi-token-prediction module, whose outputs
    go through the same matrix (DeepSeek-AI 2024b, DeepSeek-V3, §2.2)."""
    fused_loss: bool = False
    """Whether the loss is one kernel that overwrites the logits with their gradient, in their own type
    (Transformer Engine, ``parallel_cross_entropy``; Hsu et al. 2024, Liger Kernel, §3.2)."""

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


@dataclass(frozen=True)
class Joining:
    """The first part of a multi-token-prediction module (DeepSeek-AI 2024b, DeepSeek-V3, §2.2).

    It looks up the next token, normalises it and the stream, joins both and projects them to the stream's
    width. A block of the model follows, then a norm; the head computes the logits. The table of tokens is
    the embedding's: a rank without the embedding has a copy of it (Megatron-LM,
    ``MultiTokenPredictionLayer``).
    """

    embedding: Embedding
    copies_table: bool = False
    """Whether the module's rank holds a copy of the embedding's table."""

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


@dataclass(frozen=True)
class Patches:
    """The start of a vision encoder: a linear layer on the values of a patch, and positions.

    Dosovitskiy et al. 2021, An Image is Worth 16x16 Words, §3.1. The encoder is trained with the model.
    Parallelism divides its images as the model's tokens.
    """

    values: int
    """Values of a patch: 3 colours times its pixels."""
    positions: int = 0
    """Rows of the table of learned positions."""

    def part(self, shapes: Shapes) -> Part:
        """Costs and memory on one device; images have no gradient, but the product's I is counted."""
        h, own = shapes.stream.hidden, shapes.own_tokens
        others = (1 if shapes.stream.bias else 0) + self.positions
        return Part(
            parameters=Parameters(shared=0, replicated=(self.values + others) * h),
            products=(Product(own, self.values, h, is_narrow=False),),
            tensors=(
                Held("images", shapes.own(self.values), after_input=True, is_input=True),
                gradient("gradient of the patches", shapes.hidden),
            ),
            moved=PerAction(3 * shapes.hidden, shapes.hidden),
            exchanges=(),
            workspace=2 * shapes.hidden,
            output_bytes=shapes.hidden,
        )


@dataclass(frozen=True)
class Projector:
    """The end of a vision encoder: a norm, and matrices from merged patches to a token of the model.

    Liu et al. 2023, Visual Instruction Tuning, §4.1.
    """

    merged: int
    """Patches that become one token."""
    widths: tuple[int, ...]
    """Widths after each matrix; the last one is that of the model."""
    pooled: bool = False
    """Whether merged patches are averaged, instead of joined."""
    gated: bool = False
    """Whether the last matrix but one has a gate, as in GLM-4.1V."""
    copies: int = 1
    """Projectors: Qwen3-VL also has some for other blocks than the last, whose tokens are added to the
    model's first blocks (Bai et al. 2025, DeepStack)."""

    def part(self, shapes: Shapes) -> Part:
        """Costs and memory on one device; every device computes it for its own patches."""
        stream, rows = shapes.stream, shapes.own_tokens / self.merged
        first = stream.hidden * (1 if self.pooled else self.merged)
        sizes = tuple(zip((first, *self.widths), self.widths, strict=False))
        inner = [int(stream.dtype_bytes * rows * width) for width in self.widths]
        between, gates = sum(inner[:-1]), 0
        traffic = Mlp(self.widths[0], gated=False).activation_traffic(between)
        if self.gated:
            sizes, gates = (*sizes[:-1], sizes[-2], sizes[-1]), inner[-2]
            plain = Mlp(self.widths[0], gated=False).activation_traffic(between - gates)
            traffic = plain + Mlp(self.widths[-2], gated=True).activation_traffic(gates)
        matrices = sum(n_in * n_out + (n_out if stream.bias else 0) for n_in, n_out in sizes)
        return Part(
            parameters=Parameters(
                shared=0, replicated=self.copies * (matrices + stream.hidden * stream.norm_values)
            ),
            products=tuple(Product(rows, n_in, n_out) for n_in, n_out in sizes) * self.copies,
            tensors=(
                *norm_tensors(shapes, "the encoder's last norm"),
                Held("input of the projector's first matrix", self.copies * shapes.hidden, after_input=True),
                Held("input of its activation", self.copies * (between + gates)),
                Held("inputs of its other matrices", self.copies * between, after_input=True),
                gradient("gradients of its matrices", self.copies * (sum(inner) + gates)),
            ),
            moved=(PerAction(2 * shapes.hidden, 3 * shapes.hidden) + traffic).scaled(self.copies),
            exchanges=(),
            workspace=3 * max(inner) + shapes.hidden,
            output_bytes=self.copies * inner[-1],
        )
