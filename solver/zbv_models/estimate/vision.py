"""A vision encoder in front of the model: patches, blocks of a ViT, and a projector to the model's width.

Dosovitskiy et al. 2021, An Image is Worth 16x16 Words, §3.1; Liu et al. 2023, Visual Instruction Tuning,
§4.1, for the projector. The encoder is trained with the model. Parallelism divides its images as the model's
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from zbv_models.estimate.amounts import PerAction
from zbv_models.estimate.mlp import Mlp
from zbv_models.estimate.parameters import Parameters
from zbv_models.estimate.part import Held, Part, Product, gradient, norm_tensors
from zbv_models.estimate.shapes import Shapes


@dataclass(frozen=True)
class Patches:
    """A linear layer on the values of a patch, and positions.

    Attributes
    ----------
    values
        Values of a patch: 3 colours times its pixels.
    learned_positions
        Whether every patch has a learned position.
    """

    values: int
    learned_positions: bool = True

    def part(self, shapes: Shapes) -> Part:
        """Costs and memory on one device; images have no gradient, but the product's I is counted."""
        h, own = shapes.stream.hidden, shapes.own_tokens
        others = (1 if shapes.stream.bias else 0) + (shapes.sequence if self.learned_positions else 0)
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
    """A norm and matrices from a number of merged patches to a token of the model.

    Attributes
    ----------
    merged
        Patches that become one token.
    widths
        Widths after each matrix; the last one is that of the model.
    pooled
        Whether merged patches are averaged, instead of joined.
    gated
        Whether the last matrix but one has a gate, as in GLM-4.1V.
    copies
        Projectors: Qwen3-VL also has some for other blocks than the last, whose tokens are added to the
        model's first blocks (Bai et al. 2025, DeepStack).
    """

    merged: int
    widths: tuple[int, ...]
    pooled: bool = False
    gated: bool = False
    copies: int = 1

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
