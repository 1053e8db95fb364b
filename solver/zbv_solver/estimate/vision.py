"""A vision encoder in front of the model: patches, blocks of a ViT, and a projector to the model's width.

Dosovitskiy et al. 2021, An Image is Worth 16x16 Words, §3.1; Liu et al. 2023, Visual Instruction Tuning,
§4.1, for the projector. The encoder is trained with the model. Parallelism divides its images as the model's
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from zbv_solver.estimate.amounts import PerAction
from zbv_solver.estimate.mlp import Mlp
from zbv_solver.estimate.parameters import Parameters
from zbv_solver.estimate.part import Held, Part, Product, gradient, norm_tensors
from zbv_solver.estimate.shapes import Shapes


@dataclass(frozen=True)
class Patches:
    """A linear layer on the values of a patch, and learned positions.

    Attributes
    ----------
    values
        Values of a patch: 3 colours times its pixels.
    """

    values: int

    def part(self, shapes: Shapes) -> Part:
        """Costs and memory on one device; images have no gradient, but the product's I is counted."""
        h, own = shapes.stream.hidden, shapes.own_tokens
        return Part(
            parameters=Parameters(shared=0, replicated=self.values * h + h + shapes.sequence * h),
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
    """A norm and an MLP from a number of merged patches to a token of the model.

    Attributes
    ----------
    merged
        Patches that become one token.
    width
        Width between its matrices, and of the model.
    """

    merged: int
    width: int

    def part(self, shapes: Shapes) -> Part:
        """Costs and memory on one device; every device computes it for its own patches."""
        stream, rows = shapes.stream, shapes.own_tokens / self.merged
        first = stream.hidden * self.merged
        inner = int(stream.dtype_bytes * rows * self.width)
        traffic = Mlp(self.width, gated=False).activation_traffic(inner)
        return Part(
            parameters=Parameters(
                shared=0,
                replicated=first * self.width
                + self.width**2
                + 2 * self.width
                + stream.hidden * stream.norm_values,
            ),
            products=(Product(rows, first, self.width), Product(rows, self.width, self.width)),
            tensors=(
                *norm_tensors(shapes, "the encoder's last norm"),
                Held("input of the projector's first matrix", shapes.hidden, after_input=True),
                Held("input of its activation", inner),
                Held("input of its last matrix", inner, after_input=True),
                gradient("gradients of both matrices", 2 * inner),
            ),
            moved=PerAction(2 * shapes.hidden, 3 * shapes.hidden) + traffic,
            exchanges=(),
            workspace=3 * inner + shapes.hidden,
            output_bytes=inner,
        )
